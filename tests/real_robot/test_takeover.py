"""A person takes over from a policy, and gives the arm back: in the control process, turn by turn,
and in `embodied deploy` with a SpaceMouse that is a pipe."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError
from embodied.datasets.lerobot.reader import read_episodes
from embodied.embodiments import fr3
from embodied.real_robot.ipc.channels import PERSON, TAKEOVER
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import VERSION, Command, Mode
from embodied.real_robot.teleop.takeover import Takeover
from tests.builders import node_of
from tests.real_robot.operators import Hand
from tests.real_robot.test_control import DOWN, DT, STEP, Bench, within
from tests.real_robot.test_daemon import until
from tests.real_robot.test_deploy import CROWDED, robot, said, start, status
from tests.real_robot.test_record import deployment
from tests.tiers import only_all

__all__ = ["deployment"]  # a fixture
UP = np.array([0.0, 0.0, 1.0, -1.0])


class Bedside(Bench):
    """A bench with a person beside it, who says `theirs` where they have the arm."""

    theirs: np.ndarray[Any, Any] | None = None

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if self.theirs is not None:
                self.person(self.theirs)
            super().run(1)

    def person(self, theirs: np.ndarray[Any, Any] | None, **fields: Any) -> None:
        """Their action [A], or that they have let go."""
        message = self.there.takeover.fields[0]
        message["number"] += 1
        message["over"], message["start"] = theirs is not None, self.now
        message["seen"] = self.there.state.fields["measured"][0]
        if theirs is not None:
            message["size"] = len(theirs)
            message["action"][: len(theirs)] = theirs
        for name, value in fields.items():
            message[name] = value
        self.there.takeover.send()

    @property
    def height(self) -> float:
        return float(fr3.forward(self.sent[-1][None])[0][0, 2])

    @property
    def intervened(self) -> bool:
        return bool(self.there.state.fields["intervened"][0])


@pytest.fixture
def bench(tmp_path: Path) -> Bedside:
    return Bedside(tmp_path)


def test_a_person_is_followed_in_place_of_the_policy(bench: Bedside) -> None:
    bench.moving()
    bench.run(10)
    before = bench.height
    assert not bench.intervened
    bench.theirs, actions = UP, list[float]()
    for _ in range(60):
        bench.run(1)
        actions.append(bench.there.state.fields["action"][0][2].item())
    assert set(actions) <= {-1.0, 1.0} and actions[10] == 1.0, "one or the other, not blended"
    assert bench.intervened and bench.height > before + 0.02, "up, though the policy says down"
    assert bench.there.state.fields["action"][0][:4].tolist() == UP.tolist()
    assert bench.control.source.follower.width < 0.04, "they close the hand"
    bench.theirs = None
    bench.person(None)
    high = bench.height
    bench.run(60)
    assert not bench.intervened and bench.height < high - 0.02, "the policy goes on"
    assert bench.mode == Mode.RUNNING and not bench.fault
    within(bench.sent)


def test_what_the_policy_decided_before_the_arm_was_given_back_is_not_followed(
    bench: Bedside,
) -> None:
    bench.moving()
    bench.theirs = UP
    bench.run(20)
    bench.theirs, bench.action = None, None
    bench.person(None)
    bench.speak(DOWN)
    fields = bench.there.chunk.fields[0]
    fields["seen"] -= 0.5
    bench.there.chunk.send()
    bench.run(round(3 * STEP / DT))
    assert bench.control.source.follower.starved, "it waits for a newer one"
    bench.speak(DOWN)
    bench.run(round(2 * STEP / DT))
    assert not bench.control.source.follower.starved and not bench.intervened


def test_a_terminal_that_dies_while_a_person_has_the_arm_stops_it(bench: Bedside) -> None:
    """The policy speaks all the time, and is not asked."""
    bench.moving()
    bench.theirs = UP
    bench.run(20)
    bench.theirs = None
    bench.run(30)
    held = bench.sent[-1]
    bench.run(5)
    assert np.abs(bench.sent[-1] - held).max() < 1e-6, "held"
    bench.run(40)
    assert bench.mode == Mode.ESTOP and "old" in bench.fault, bench.fault
    within(bench.sent)
    bench.run(100)
    bench.ask(Command.RESET)
    bench.moving()
    bench.run(20)
    assert not bench.control.source.follower.starved, "after a reset the policy has the arm"


def test_a_policy_that_dies_does_not_stop_a_person(bench: Bedside) -> None:
    bench.moving()
    bench.theirs, bench.action = UP, None
    bench.run(150)
    assert bench.mode == Mode.RUNNING and bench.intervened
    bench.theirs = None
    bench.person(None)
    bench.run(100)
    assert bench.mode == Mode.ESTOP, "nobody moves it any more"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"size": 3}, "the person's action has 3 numbers for 4 actions"),
        ({"size": -1}, "the person's action has -1 numbers"),
        ({"start": np.nan}, "the person's action has start=nan"),
        ({"seen": np.inf}, "the person's action has seen=inf"),
        ({"start": 2000.0}, "the person's action starts"),
        ({"action": np.nan}, "not a finite number"),
    ],
)
def test_what_no_terminal_should_say_is_a_fault(
    bench: Bedside, wrong: dict[str, Any], reason: str
) -> None:
    bench.moving()
    bench.person(UP, **wrong)
    bench.run(10)
    assert bench.mode == Mode.ESTOP and reason in bench.fault, bench.fault
    assert bench.ask(Command.RESET) != Mode.RUNNING
    within(bench.sent)


def test_the_hand_stays_as_the_policy_left_it(deployment: Any, tmp_path: Path) -> None:
    """Taking over neither opens nor closes it; a button does."""
    hand = Hand(tmp_path / "hidraw0")
    device = node_of("real_robot.teleop.devices.SpaceMouse", path=str(hand.path))
    node = node_of("real_robot.teleop.teleop.Teleoperator", device=device, linger=0.0)
    with Takeover(node, deployment) as takeover:
        state = Mailbox(tmp_path / "state", takeover.record, VERSION, create=True)
        there = Mailbox(tmp_path / TAKEOVER, PERSON, VERSION, create=True)
        fields = state.fields[0]
        fields["q"], fields["mode"], fields["size"] = fr3.HOME, Mode.RUNNING, 4
        fields["action"][3], fields["measured"] = -0.4, 7.0
        state.send()
        takeover.start(tmp_path)
        newest = there.fields[0]

        def says(over: bool) -> bool:
            return there.receive() and bool(newest["over"]) is over

        until(lambda: says(False), "nobody has taken over")
        hand.push(0, 0, -350)
        until(lambda: says(True), "they have")
        assert newest["action"][:4].tolist() == pytest.approx([0.0, 0.0, 1.0, -0.4])
        assert float(newest["seen"]) == 7.0 and float(newest["start"]) > 0
        hand.press(2)  # the second button opens
        until(lambda: says(True) and newest["action"][3] == 1.0, "the hand opens")
        hand.push(0, 0, 0)
        until(lambda: says(True) and newest["action"][2] == 0.0, "only the button is held")
        hand.press(0)
        until(lambda: says(False), "let go")
    os.close(hand.pipe)
    joints = node_of("embodiments.joint_position.JointPosition")
    with pytest.raises(ConfigError, match="cannot be teleoperated"):
        Takeover(node, deployment.parse({**vars(deployment), "controller": joints}))


@only_all  # in simulated time: above
def test_deploy_with_a_person_beside_it(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy that never gets there; a person moves the arm for a while; it is all recorded."""
    hand = Hand(tmp_path / "hidraw0")
    words = ("robot=sim", "demonstrator=reach", CROWDED, "seconds=600", *hand.words)
    deploy = start(tmp_path, folder, *words)

    def now() -> dict[str, Any]:
        assert deploy.poll() is None, said(deploy)
        return until(lambda: status(capsys, folder), "the daemon answers")

    try:
        until(lambda: now()["mode"] == "RUNNING", "it runs")
        hand.push(0, 350, -350)
        until(lambda: now()["intervened"], "a person has taken over")
        assert "a person has taken over" in robot(capsys, "status", f"folder={folder}")[1]
        until(lambda: fr3.forward(np.array([now()["q"]]))[0][0, 2] > 0.4, "they lift it up")
        for button in (2, 0):  # the second one opens; a pipe would join reports, hidraw does not
            hand.press(button)
            ticks = now()["control"]["tick"]
            until(lambda: now()["control"]["tick"] > ticks + 50, "they hold it half a second")  # noqa: B023
        hand.push(0, 0, 0)
        until(lambda: not now()["intervened"], "they have given it back")
        back = now()["control"]["tick"]
        until(lambda: now()["control"]["tick"] > back + 50, "the policy decides for half a second")
        until(lambda: fr3.forward(np.array([now()["q"]]))[0][0, 2] < 0.35, "the policy goes on")
        deploy.send_signal(signal.SIGINT)
        text = said(deploy)
    finally:
        deploy.kill()
        os.close(hand.pipe)
    assert deploy.returncode == 0 and "SpaceMouse: take over by moving it" in text, text
    place = tmp_path / "out" / "recording"
    episodes = read_episodes(place)
    rows, names = episodes.steps, episodes.spec.obs["state"].names
    theirs = rows["intervened"]
    changes = (theirs[1:] != theirs[:-1]).sum()
    assert not theirs[0] and not theirs[-1] and changes == 2, theirs.tolist()
    assert (rows["action"][theirs][:, 2] == 1.0).any() and (rows["action"][~theirs][:, 2] < 1).any()
    grip, width = rows["action"][:, 3], rows["obs/state"][:, names.index("width")]
    assert grip[0] == grip[theirs][0] == grip[-1] == -1.0, "taking over leaves it closed"
    assert grip[theirs].unique().tolist() == [-1.0, 1.0] and grip[theirs][-1] == 1.0, "their button"
    closed, opened = width[theirs & (grip == -1.0)], width[theirs & (grip == 1.0)]
    assert opened[-1] > closed[-1] + 0.005, "and the arm's hand opens"
    info = json.loads((place / "meta" / "info.json").read_text())
    assert info["features"]["intervention"]["dtype"] == "bool", "LeRobot's name"
    assert "a person took over" in (tmp_path / "out" / "daemon.log").read_text()
