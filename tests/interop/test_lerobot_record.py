"""LeRobot's own recording command on `lerobot_robot_embodied`: limits hold whatever it says.

The figures of docs/lerobot.md come from `python -m tests.interop.adversary`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.interop.adversary import environment, installed, record
from tests.interop.limits_watch import LimitsWatch

pytest.importorskip("lerobot", reason="LeRobot is not installed here: sh scripts/interop.sh")
pytestmark = pytest.mark.usefixtures("idle_machine")


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("installed"))


def run(words: list[str], plugins: Path, folder: Path, fails: bool = False) -> str:
    done = subprocess.run(
        words, env=environment(plugins, folder), capture_output=True, text=True, timeout=280
    )
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stderr


@pytest.mark.parametrize("robot", ["so101_sim", "franka_sim"])
def test_the_worst_that_it_can_say_stays_within_the_limits(
    robot: str, plugins: Path, tmp_path: Path
) -> None:
    worst = ("--robot.patience=60",), ("--teleop.no_numbers=0.02",)
    words = record(robot, 6, 30, tmp_path, robot_settings=worst[0], teleop=worst[1])
    with LimitsWatch(tmp_path / "daemon") as watch:
        run(words, plugins, tmp_path)
    watch.require()
    assert watch.modes["RUNNING"] > 50 and watch.worst["velocity"] > 0.5, "it did move"
    info = json.loads((tmp_path / "dataset" / "meta" / "info.json").read_text())
    assert info["total_episodes"] == 1 and info["total_frames"] > 20


def test_lost_packets_do_not_end_a_session(plugins: Path, tmp_path: Path) -> None:
    """Two episodes on a bus that loses 1% of its replies, with a reset between them."""
    settings = ("robot.emulator.faults={lose:0.01}",)
    calm = ("--teleop.calm=true",)
    words = record("so101_sim", 5, 20, tmp_path, settings, teleop=calm, episodes=2)
    with LimitsWatch(tmp_path / "daemon", reset=False) as watch:
        run(words, plugins, tmp_path)
    watch.require()
    assert not watch.latched
    info = json.loads((tmp_path / "dataset" / "meta" / "info.json").read_text())
    assert info["total_episodes"] == 2


def test_a_fault_ends_it_with_the_reason(plugins: Path, tmp_path: Path) -> None:
    words = record("so101_sim", 20, 20, tmp_path, teleop=("--teleop.no_numbers=1.0",))
    said = run(words, plugins, tmp_path, fails=True)
    assert "latched a fault: a command is not a finite number" in said
    assert "embodied robot reset folder=" in said
    assert list((tmp_path / "out" / "blackbox").glob("*.npz")), "the black box is kept"
