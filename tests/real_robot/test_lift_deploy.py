"""Lift, from a world like the one behind a wire to an arm behind libfranka's protocol."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.datasets.lerobot.reader import read_episodes
from embodied.real_robot.assemble import open_flight_recorder
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.arm_state import Limits
from embodied.real_robot.kernel.mailbox import MailboxError
from tests.real_robot.test_deploy import ROOT, robot, start, trained
from tests.tiers import only_all

pytest.importorskip("franky", reason="franky-control is not installed")
pytest.importorskip("franky_sim", reason="franky-sim is not installed")

LONGEST = 600.0  # s, on a machine that does much else: its arm's time goes slower than the clock
PATIENTLY = (
    "robot.fresh={hold: 5.0, stop: 20.0, state: 10.0}",
    "robot.driver.silence=10.0",
    "robot.driver.patience=60.0",
    "robot.limits.tracking=[2, 2, 2, 2, 2, 2, 2]",
    "robot.tool_speed=3.0",
    "robot.force=300",
)


class Watched(threading.Thread):
    """Every command of a deployment in `folder`, tick by tick, as the black box has them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.over = folder, threading.Event()
        self.sent: list[Any] = []
        self.ticks: list[Any] = []

    def run(self) -> None:
        box, count = None, 0
        while not self.over.wait(0.5):
            with suppress(OSError, MailboxError, ValueError):
                if box is None:
                    made = Deployment.read(self.folder)
                    box = open_flight_recorder(made, self.folder)
                rows, count = box.since(count)
                self.sent.append(rows["sent"].reshape(-1, 7))
                self.ticks.append(rows["tick"].ravel())


def worst(sent: np.ndarray, limits: Limits, dt: float) -> float:
    """The largest share of any limit that commands [T, n], one each `dt` s, use.

    A mean of jerk over three steps is a third difference: none is larger than what it is a mean of.
    """
    low, high = np.add(limits.low, limits.margin), np.subtract(limits.high, limits.margin)
    middle, half = (low + high) / 2, (high - low) / 2
    shares = [np.abs(sent - middle) / half]
    each = ((1, limits.velocity), (2, limits.acceleration), (3, limits.jerk))
    shares += [np.abs(np.diff(sent, k, axis=0)) / dt**k / np.asarray(most) for k, most in each]
    return max(float(share.max()) for share in shares)


def test_a_run_in_a_wrapped_world_fits_the_wire(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Delays, noise and another arm in training change nothing of what is seen and done."""
    world = yaml.safe_load((ROOT / "configs/env/fr3_lift_deploy.yaml").read_text())
    run = trained(tmp_path, **world)
    code, text = robot(capsys, "check", "robot=sim", f"policy={run}")
    assert code == 0, text
    lines = {line.split()[1]: line.split()[0] for line in text.splitlines() if line[:2] == "  "}
    fine = ("policy", "rate", "actions", "observations", "parity", "limits", "freshness")
    assert {lines[name] for name in fine} == {"ok"}, text


@only_all  # its driver: test_franka.py
def test_the_cube_is_lifted_over_the_wire(tmp_path: Path, folder: Path) -> None:
    """The script that is cloned, through the real driver; no command is outside of a limit."""
    out = tmp_path / "out"
    watched = Watched(folder)
    watched.start()
    words = ["robot=franka_sim", "demonstrator=fr3_lift_deploy", f"seconds={LONGEST}", *PATIENTLY]
    deploy = start(tmp_path, folder, *words)
    try:
        text = deploy.communicate(timeout=2 * LONGEST)[0]
    finally:
        deploy.kill()
        watched.over.set()
        watched.join()
    assert deploy.returncode == 0, text
    summary = json.loads((out / "summary.json").read_text())
    assert [each["end"] for each in summary["episodes"]] == ["success"], text
    made = Deployment.read(out)
    sent, ticks = np.concatenate(watched.sent), np.concatenate(watched.ticks)
    assert len(sent) > 100 and (np.diff(ticks.astype(np.int64)) == 1).all()
    assert worst(sent, made.limits, 1 / made.hertz) <= 1 + 1e-6
    steps = read_episodes(out / "recording").episode(0)
    state, names = steps["obs/state"].numpy(), read_episodes(out / "recording").spec.obs["state"]
    height = state[:, names.names.index("cube_z")] - state[:, names.names.index("cube_half")]
    assert height[0] < 0.005 and height[-1] > 0.08, "it lay on the table, and rose"
    assert bool(steps["success"][-1])
