"""`embodied deploy robot=ur_sim`: driver, RTDE, program and a played servoj, from end to end."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from embodied.core.build import ConfigError, parse
from embodied.datasets.lerobot.reader import read_episodes
from embodied.real_robot.drivers.ur.driver import UR
from embodied.real_robot.drivers.ur.driver import Config as DriverConfig
from embodied.real_robot.emulators.ur.controller import SPEED, Config, UrArm, UrJoints
from tests.real_robot.test_deploy import said, start

HOME = (0.0, -1.5708, 1.5708, -1.5708, -1.5708, 0.0)
# For a machine that does much else at the same time.
SLOW_WIRE = tuple(f"robot.driver.{name}=10.0" for name in ("watchdog", "silence"))


def test_it_reaches_over_rtde_and_it_is_recorded(tmp_path: Path, folder: Path) -> None:
    deploy = start(tmp_path, folder, "robot=ur_sim", "demonstrator=reach", *SLOW_WIRE)
    text = said(deploy)
    assert deploy.returncode == 0, text
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["success"], text
    assert json.loads((out / "deployment.json").read_text())["robot"] == "ur5e"
    steps = read_episodes(out / "recording").episode(0)
    assert bool(steps["success"][-1]) and steps["action"].shape[1] == 3
    place = steps["obs/state"][:, 12:15].numpy()  # after q1 to q6 and dq1 to dq6
    assert np.linalg.norm(place[0] - [-0.4919, -0.1333, 0.4879]) < 0.06, "it began at home"
    assert np.linalg.norm(place[-1] - [-0.55, 0.1, 0.35]) < 0.06
    sent = steps["action/sent"].numpy()
    assert np.abs(np.diff(sent, axis=0)).max() <= 1.5 * 0.05 * 4, "within its speed"


def test_the_emulator_starts_and_ends() -> None:
    arm = UrArm(Config(HOME))
    host = arm.start()["host"]
    process = arm.process
    assert process is not None
    try:
        calm = {"frequency": 125.0, "watchdog": 20.0, "silence": 20.0, "patience": 60.0}
        with UR(DriverConfig(host, **calm)) as driver:
            assert driver.read().q.tolist() == list(HOME)
    finally:
        arm.stop()
    assert process.returncode == 0
    arm.stop()
    for bad in ({"q": HOME[:5]}, {"q": (7.0, *HOME[1:])}, {"q": HOME, "frequency": 1.0}):
        with pytest.raises(ConfigError):
            parse(Config, bad, "emulator")


def test_a_played_servoj_by_hand() -> None:
    """From rest, 1 rad away, lookahead 0.1 s, 100 Hz: it speeds up by 0.4 rad/s a tick to 2 rad/s,
    keeps that, then falls behind as (target - q) / lookahead, and is there exactly."""
    arm = UrJoints(100.0, (0.0,) * 6)
    target = [1.0, *[0.0] * 5]
    speeds = []
    for _ in range(400):
        arm.follow(target, 0.1)
        speeds.append(arm.dq[0])
    assert speeds[:6] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    assert max(speeds) == SPEED == 2.0 and arm.q[0] == 1.0 and arm.dq[0] == 0.0
    late = speeds[60:64]  # q' = (1 - q) / 0.1 s, in ticks of 0.01 s: falls by a tenth
    assert [b / a for a, b in pairwise(late)] == pytest.approx([0.9] * 3)
    arm.dq[0] = 0.1
    arm.turn([0.0] * 6, 4.0)  # stopj: 0.04 rad/s a tick
    assert arm.dq[0] == pytest.approx(0.06) and arm.q[0] == pytest.approx(1.0 + 0.0006)
