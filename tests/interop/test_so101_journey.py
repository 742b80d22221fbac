"""A dataset of LeRobot's own command becomes a policy, which drives the same arm through our driver
and through LeRobot's: no mapping, rate or controller is said, and it sees what was recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.commands.train import train
from embodied.core import checkpoint
from embodied.datasets.lerobot.reader import read_episodes
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.servos.bus import signed
from embodied.real_robot.emulators.servos.bus import FakeBus
from embodied.real_robot.rl.rehearsal import remember
from tests.interop.adversary import KEYS, installed, record
from tests.interop.test_lerobot_record import started
from tests.real_robot.operators import Operator
from tests.real_robot.test_daemon import PATIENT
from tests.real_robot.test_deploy import ENV, ROOT, said, start
from tests.real_robot.test_rehearsal import arm

pytest.importorskip("lerobot", reason="LeRobot is not installed here: sh scripts/interop.sh")
pytestmark = pytest.mark.usefixtures("idle_machine")

NAMES = tuple(f"{name}.pos" for name in (*KEYS["so101_sim"], "gripper"))
YAML: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "robot" / "so101_sim.yaml").read_text())
SMALL = ("policy=flow", "learner=imitate", "policy.width=32", "policy.depth=1", "steps=30")


class Told(FakeBus):
    """An emulated arm that remembers all ticks that its servos have told."""

    def __init__(self, ticks: Sequence[int] = YAML["emulator"]["ticks"]) -> None:
        super().__init__("feetech", ticks)
        self.ticks: list[list[int]] = []

    def _move(self) -> float:
        now = super()._move()
        tables = [servo.table for servo in self.servos.values()]
        self.ticks.append([signed(int.from_bytes(each[56:58], "little"), 15) for each in tables])
        return now

    def require(self, recording: Path, at_least: float) -> None:
        """Every state of a recording is, by LeRobot's own formula, one that the servos told: to 0.1
        degree, and to 0.1 of the gripper's 100. In it the arm moves by `at_least` degrees."""
        spec = read_episodes(recording).spec
        assert spec.obs["state"].names == spec.act.names == NAMES and spec.dt == 0.05
        ticks, hand = np.array(self.ticks, float), YAML["driver"]["hand"]
        middle = [(joint["low"] + joint["high"]) / 2 for joint in YAML["driver"]["joints"]]
        told = np.empty_like(ticks)
        told[:, :5] = (ticks[:, :5] - middle) * 360 / 4095
        told[:, 5] = 100 * (ticks[:, 5] - hand["closed"]) / (hand["open"] - hand["closed"])
        told[:, 5] = told[:, 5].clip(0, 100)
        seen = read_episodes(recording).steps["obs/state"].numpy()
        apart = [np.abs(told - row).max(1).min() for row in seen]
        assert max(apart) < 0.1, f"step {np.argmax(apart)} is {max(apart):.2f} off"
        assert np.ptp(seen, 0).max() > at_least


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The daemon's, which only this user can open."""
    place = tmp_path / "d"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a dataset that `lerobot-record` made of an SO-101, whose states are those that its
    servos told. The calibration counts as rehearsed for a user whose home is beside the run."""
    folder = tmp_path_factory.mktemp("recorded")
    calm = ("--teleop.calm=true", "--teleop.low=0", "--teleop.high=30")
    with Told() as bus, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        remember(Deployment.parse(arm(bus)))
        real = ("robot.emulator=null", f"robot.driver.port={bus.path}", "robot.driver.timeout=0.3")
        words = record("so101_sim", 6, 20, folder, real, teleop=calm, episodes=2)
        started(words, installed(folder), folder)
    bus.require(folder / "dataset", 5.0)
    out = train([f"demos={folder / 'dataset'}", f"out={folder / 'run'}", *SMALL])
    spec = checkpoint.load_spec(out)
    assert spec.obs["state"].names == spec.act.names == NAMES and spec.dt == 0.05
    return out


def require_within(recording: Path) -> None:
    seen = read_episodes(recording).steps["obs/state"].numpy()
    low, high = seen.min(0), seen.max(0)
    assert (low > -10).all() and (high < 60).all(), "it stays where the data are"


def test_through_our_driver(
    trained: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "HOME", str(trained.parent))
    with Told() as bus:
        words = ("robot=so101_sim", f"policy={trained}", "seconds=3", "robot.driver.timeout=0.3")
        real = ("robot.emulator=null", f"robot.driver.port={bus.path}")
        deploy = start(tmp_path, folder, *words, *real)
        text = said(deploy)
    assert deploy.returncode == 0 and "FAIL" not in text and "ok   units" in text, text
    bus.require(tmp_path / "out" / "recording", 1.0)
    require_within(tmp_path / "out" / "recording")


def test_through_lerobots_driver(
    trained: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rehearsal of its calibration, which is new."""
    monkeypatch.setitem(ENV, "HOME", str(tmp_path))
    driver = YAML["driver"]
    ends = [(joint["low"], joint["high"]) for joint in driver["joints"]]
    ends.append((driver["hand"]["closed"], driver["hand"]["open"]))
    names = [name.removesuffix(".pos") for name in NAMES]
    rows = {
        name: {"id": i, "drive_mode": 0, "homing_offset": 0, "range_min": low, "range_max": high}
        for i, (name, (low, high)) in enumerate(zip(names, ends, strict=True), 1)
    }
    (tmp_path / "arm.json").write_text(json.dumps(rows))
    with Told((2244, 2341, 2452, 2406, 2048, 2500)) as bus:  # near home, and free
        for id, (low, high) in enumerate(ends, 1):
            bus.servos[id].table[9:11] = low.to_bytes(2, "little")
            bus.servos[id].table[11:13] = high.to_bytes(2, "little")
        settings = f"{{id: arm, calibration_dir: {tmp_path}}}"
        words = ("deploy", "robot=lerobot", f"policy={trained}", "seconds=3", "out=out",
                 f"robot.driver.port={bus.path}", f"robot.driver.settings={settings}",
                 f"robot.driver.python={sys.executable}", "robot.driver.silence=2.0",
                 "robot.driver.hertz=20")  # fmt: skip
        operator = Operator(tmp_path, folder, *words)
        try:
            operator.rehearses()
            operator.says("is held. From here on")
            operator.types(b"y\n")
            operator.says("episode 1:")
            assert operator.process.wait(PATIENT) == 0, operator.text.decode()
        finally:
            operator.close()
    assert b"FAIL" not in operator.text and b"ok   units" in operator.text
    bus.require(tmp_path / "out" / "recording", 1.0)
    require_within(tmp_path / "out" / "recording")
