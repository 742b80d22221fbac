"""The rehearsal of a new calibration: each joint of an emulated arm alone, with somebody who looks
on; and nothing else moves an arm before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.core.build import ConfigError
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.emulators.servos.bus import FakeBus
from embodied.real_robot.rl import rehearsal
from embodied.real_robot.rl.rehearsal import (
    in_words,
    is_rehearsed,
    rehearse,
    remember,
    require_rehearsed,
    tool_poses,
)
from tests.real_robot.operators import Operator
from tests.real_robot.test_daemon import PATIENT
from tests.real_robot.test_deploy import ENV, ROOT

YAML = yaml.safe_load((ROOT / "configs" / "robot" / "so101_sim.yaml").read_text())
TICKS = YAML["emulator"]["ticks"]


@pytest.fixture
def bus() -> Iterator[FakeBus]:
    with FakeBus("feetech", TICKS) as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three degrees in half a second instead of in one; a home without a calibration."""
    monkeypatch.setattr(rehearsal, "STEPS", 10)
    monkeypatch.setattr(rehearsal, "REST", 6)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setitem(ENV, "HOME", str(tmp_path / "home"))


def arm(bus: FakeBus, **joint: dict[str, Any]) -> dict[str, Any]:
    """The settings of a real SO-101, whose servos are the emulated bus; `joint`: what differs."""
    node = {key: value for key, value in YAML.items() if key not in ("_target_", "emulator")}
    joints = [{**each, **joint.get(each["name"], {})} for each in node["driver"]["joints"]]
    driver = {**node["driver"], "port": bus.path, "timeout": 0.3, "joints": joints}
    fresh = {"hold": 1.0, "stop": 10.0, "state": 5.0}
    return {**node, "driver": driver, "fresh": fresh, "spin": False, "policy": ""}


def test_each_joint_is_tried_alone_and_asked_once(bus: FakeBus, folder: Path) -> None:
    made = Deployment.parse(arm(bus))
    with pytest.raises(ConfigError, match=r"the calibration of so101 is new: .*embodied robot tel"):
        require_rehearsed(made)
    seen: list[list[float]] = []
    asked: list[str] = []
    look = bus._move

    def watched() -> float:
        now = look()
        seen.append([servo.at for servo in bus.servos.values()])
        return now

    bus._move = watched
    rehearse(made, folder, None, lambda line: asked.append(line) is None)
    names = ["shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll"]
    assert [line.split()[0] for line in asked] == names
    assert "to the left" in asked[0] or "to the right" in asked[0]
    assert "the hand first turn" in asked[4], "the tool of a roll goes nowhere"
    ways = np.ptp(seen, axis=0)
    assert (ways[:5] > 25).all() and (ways[:5] < 45).all(), "3 degrees are 34 ticks"
    assert ways[5] < 10, "the hand stays"
    remember(made)
    require_rehearsed(made)
    other = Deployment.parse(arm(bus, elbow_flex={"sign": -1}))
    assert not is_rehearsed(other), "another calibration is new"
    assert is_rehearsed(replace(other, dry=True)), "nothing moves"
    assert is_rehearsed(Deployment.parse({**arm(bus), "emulator": YAML["emulator"]}))


def ends(bus: FakeBus, folder: Path, says: str, sees: bool = True, **more: Any) -> None:
    """Rehearse with a person who sees each joint move as is said, or not."""
    with pytest.raises(ConfigError, match=says):
        rehearse(Deployment.parse({**arm(bus), **more}), folder, None, lambda line: sees)


def test_a_joint_that_turns_the_other_way_ends_it(bus: FakeBus, folder: Path) -> None:
    """The person sees what the servo does, and is asked what the kinematics say."""
    ends(bus, folder, r"shoulder_pan turns the other way .*driver.joints", sees=False)


def test_an_arm_that_stands_in_something_is_moved_by_hand_first(bus: FakeBus, folder: Path) -> None:
    geometry = {**YAML["geometry"], "margin": 0.02}
    says = r"shoulder_pan cannot be tried.*6 mm too near.*free pose"
    ends(bus, folder, says, geometry=geometry)


def test_a_joint_that_stays_ends_it(bus: FakeBus, folder: Path) -> None:
    bus.servos[2].measure()  # where it stands, which the bus's thread may not have written yet
    bus.servos[2].move = lambda now: None  # blocked
    ends(bus, folder, r"shoulder_lift was sent by -?3\.0 degrees, and should")


def test_words_are_those_of_the_tool() -> None:
    poses = tool_poses(YAML["kinematics"])
    home, way = np.array(YAML["home"]), np.radians(3)
    for joint, sign, words in (
        (0, 1, "move to the left"),
        (0, -1, "move to the right"),
        (1, 1, "move "),
        (3, 1, "move down"),  # positive turns about y press the hand down
        (4, 1, "turn clockwise, for one who looks away from the arm"),
        (4, -1, "turn anticlockwise"),
    ):
        after = home.copy()
        after[joint] += sign * way
        assert words in in_words(*poses(np.array([home, after]), joint))
    pair = np.zeros((2, 12))
    pair[1, 6 + 0] = way  # the second arm's pan: the first one's tool stays where it is
    assert "move to the left" in in_words(*tool_poses("two_so101")(pair, 6))
    assert "count upwards" in in_words(np.zeros(12), np.zeros(12))


def test_deploy_asks_for_it_at_a_terminal(bus: FakeBus, tmp_path: Path, folder: Path) -> None:
    """Before the first motion; then it is known."""
    node = arm(bus)
    node.pop("policy")
    (tmp_path / "mine" / "robot").mkdir(parents=True)
    target = {"_target_": YAML["_target_"]}
    (tmp_path / "mine" / "robot" / "my_arm.yaml").write_text(yaml.safe_dump(target | node))
    words = ["deploy", "--config-dir", "mine", "robot=my_arm", "demonstrator=reach", "seconds=1"]
    operator = Operator(tmp_path, folder, *words, "out=first", "record=false")
    try:
        operator.rehearses()
        operator.says("is held. From here on")
        operator.types(b"y\n")
        operator.says("episode 1:")
        assert operator.process.wait(PATIENT) == 0, operator.text.decode()
        assert b"is new" in operator.text
    finally:
        operator.close()
    assert is_rehearsed(Deployment.parse(arm(bus)))
