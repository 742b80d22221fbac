"""`embodied deploy` with a drone: take-off, flight to a goal, a recording, and down again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from embodied.core.build import build
from embodied.core.checkpoint import save
from embodied.core.policy import Policy
from embodied.datasets.lerobot.reader import read_episodes
from embodied.envs.quadrotor.goto_env import Config, QuadrotorGoto
from tests.real_robot.test_deploy import robot, said, start


def test_a_drone_flies_to_its_goal_and_comes_down(tmp_path: Path, folder: Path) -> None:
    """It knows its place from a motion capture system beside it."""
    outside = "robot.emulator.external=true"
    deploy = start(tmp_path, folder, "robot=crazyflie_sim", "demonstrator=fly", outside)
    text = said(deploy)
    assert deploy.returncode == 0, text
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["success"], text
    log = (out / "daemon.log").read_text()
    assert "IDLE -> HOMING" in log and "ARMED -> RUNNING" in log and "fault" not in log
    episode = read_episodes(out / "recording").episode(0)
    sent = episode["action/sent"].numpy()
    assert sent[0, 2] > 0.3, "the episode began in the air"
    assert np.abs(np.diff(sent, axis=0)).max() <= 0.8 * 0.05 * 1.5, "the limits were kept"
    assert np.linalg.norm(sent[-1, :3] - [0.5, -0.3, 0.8]) < 0.1


def test_a_policy_of_the_setpoint_world_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rate, actions, observations and parity: what it was trained in is what is flown."""
    spec = QuadrotorGoto(Config(num_envs=1)).spec
    policy = build(
        {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian", "hidden": [16]},
        Policy,
        spec=spec,
    )
    run = tmp_path / "run"
    save(run / "checkpoints" / "00000000", policy, 0)
    world = {"_target_": "embodied.envs.quadrotor.goto_env.QuadrotorGoto", "num_envs": 4}
    (run / "run.yaml").write_text(yaml.safe_dump({"env": world, "data": {"normalize": False}}))
    code, text = robot(capsys, "check", "robot=crazyflie_sim", f"policy={run}")
    lines = {line.split()[1]: line.split()[0] for line in text.splitlines() if line[:2] == "  "}
    fine = ("policy", "rate", "actions", "observations", "parity", "limits", "workspace")
    assert code == 0 and {lines[name] for name in fine} == {"ok"}, text
