"""LeRobot's own recording command on `lerobot_robot_embodied`: limits hold whatever it says.

The figures of docs/lerobot.md come from `python -m tests.interop.adversary`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embodied.datasets.lerobot.reader import read_episodes
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


def test_its_other_commands_take_the_robot_and_the_recording(plugins: Path, tmp_path: Path) -> None:
    """Replay, teleoperation, calibration and the editing of datasets; no process is left."""
    calm = ("--teleop.calm=true", "--teleop.low=0", "--teleop.high=30")
    words = record("so101_sim", 3, 20, tmp_path, teleop=calm, episodes=2)
    run(words, plugins, tmp_path)
    robot, teleop, dataset, kept = (
        [word for word in words if word.startswith("--robot")],
        [word for word in words if word.startswith("--teleop")],
        *(tmp_path / name for name in ("dataset", "kept")),
    )
    recorded = [f"--dataset.root={dataset}", "--dataset.repo_id=test/adversary", "--dataset.fps=20"]
    edited = [f"--root={dataset}", "--repo_id=test/adversary", f"--new_root={kept}"]
    edited += ["--new_repo_id=test/kept", "--operation.type=delete_episodes"]
    for command, more in {
        "replay": [*robot, *recorded, "--dataset.episode=0", "--play_sounds=false"],
        "teleoperate": [*robot, *teleop, "--fps=20", "--teleop_time_s=2"],
        "calibrate": robot,
        "edit_dataset": [*edited, "--operation.episode_indices=[0]"],
    }.items():
        script = f"lerobot.scripts.lerobot_{command}"
        run([sys.executable, "-m", script, *more], plugins, tmp_path)
    whole, rest = read_episodes(dataset), read_episodes(kept)
    assert len(rest) == 1
    assert torch.equal(rest.episode(0)["obs/state"], whole.episode(1)["obs/state"])
    lines = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [line for line in lines if str(tmp_path).encode() in line]


def test_a_fault_ends_it_with_the_reason(plugins: Path, tmp_path: Path) -> None:
    words = record("so101_sim", 20, 20, tmp_path, teleop=("--teleop.no_numbers=1.0",))
    said = run(words, plugins, tmp_path, fails=True)
    assert "latched a fault: a command is not a finite number" in said
    assert "embodied robot reset folder=" in said
    assert list((tmp_path / "out" / "blackbox").glob("*.npz")), "the black box is kept"
