"""LeRobot's own commands with `lerobot_robot_embodied` and a policy of ours: limits hold whatever
they say, the actions are ours, and a rollout reaches its goal.

The figures of docs/lerobot.md come from `python -m tests.interop.adversary`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import Node, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import read_episodes
from embodied.embodiments import so101
from tests.builders import node_of
from tests.interop.adversary import environment, installed, own_python, record
from tests.interop.limits_watch import LimitsWatch

pytest.importorskip("lerobot", reason="LeRobot is not installed here: sh scripts/interop.sh")
pytestmark = pytest.mark.usefixtures("idle_machine")


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("installed"))


def started(
    words: list[str], plugins: Path, folder: Path, fails: bool = False
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words, env=environment(plugins, folder), capture_output=True, text=True, timeout=280
    )
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.mark.parametrize("robot", ["so101_sim", "franka_sim"])
def test_the_worst_that_it_can_say_stays_within_the_limits(
    robot: str, plugins: Path, tmp_path: Path
) -> None:
    worst = ("--robot.patience=60",), ("--teleop.no_numbers=0.02",)
    words = record(robot, 6, 30, tmp_path, robot_settings=worst[0], teleop=worst[1])
    with LimitsWatch(tmp_path / "daemon") as watch:
        started(words, plugins, tmp_path)
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
        started(words, plugins, tmp_path)
    watch.require()
    assert not watch.latched
    info = json.loads((tmp_path / "dataset" / "meta" / "info.json").read_text())
    assert info["total_episodes"] == 2


def test_its_other_commands_take_the_robot_and_the_recording(plugins: Path, tmp_path: Path) -> None:
    """Replay, teleoperation, calibration and the editing of datasets; no process is left."""
    calm = ("--teleop.calm=true", "--teleop.low=0", "--teleop.high=30")
    words = record("so101_sim", 3, 20, tmp_path, teleop=calm, episodes=2)
    started(words, plugins, tmp_path)
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
        started([sys.executable, "-m", script, *more], plugins, tmp_path)
    whole, rest = read_episodes(dataset), read_episodes(kept)
    assert len(rest) == 1
    assert torch.equal(rest.episode(0)["obs/state"], whole.episode(1)["obs/state"])
    lines = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [line for line in lines if str(tmp_path).encode() in line]


def test_a_fault_ends_it_with_the_reason(plugins: Path, tmp_path: Path) -> None:
    words = record("so101_sim", 20, 20, tmp_path, teleop=("--teleop.no_numbers=1.0",))
    said = started(words, plugins, tmp_path, fails=True).stderr
    assert "latched a fault: a command is not a finite number" in said
    assert "embodied robot reset folder=" in said
    assert list((tmp_path / "out" / "blackbox").glob("*.npz")), "the black box is kept"


NAMES = tuple(f"{what}_{axis}" for what in ("tool", "lead", "goal") for axis in "xyz")
ACTIONS = ("dx", "dy", "dz", "gripper")
REACH = node_of("policies.scripted.fr3.Scripted", task="reach", quality=1.0, step=0.015)
GOAL = (0.26, 0.1, 0.1)


def saved(made: Node, folder: Path) -> Policy:
    obs = {"state": Leaf((9,), names=NAMES)}
    act = Leaf((4,), low=-1.0, high=1.0, names=ACTIONS)
    policy = build(made, Policy, spec=Spec(obs=obs, act=act, dt=0.05)).eval()
    checkpoint.save(folder / "checkpoints" / "00000000", policy, 0)
    return policy


def described(run: Path, out: Path, plugins: Path, folder: Path) -> str:
    words = [sys.executable, "-m", "lerobot_policy_embodied", str(run), f"out={out}"]
    return started(words, plugins, folder).stdout


def test_the_same_noise_gives_the_same_chunk(plugins: Path, tmp_path: Path) -> None:
    flow = node_of("policies.generative.flow.Flow", chunk=4, width=16)
    policy = saved(flow, tmp_path / "run")
    said = described(tmp_path / "run", tmp_path / "lerobot", plugins, tmp_path)
    assert json.dumps(NAMES) in said
    sys.path.insert(0, str(plugins))
    try:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors
        from lerobot.utils.import_utils import register_third_party_plugins

        register_third_party_plugins()
        path = str(tmp_path / "lerobot")
        config = PreTrainedConfig.from_pretrained(path)
        theirs = get_policy_class(config.type).from_pretrained(path, config=config)
        before, after = make_pre_post_processors(config, pretrained_path=path)
    finally:
        sys.path.remove(str(plugins))
    numbers = torch.rand(3, 15)
    noise = policy.sample_noise(3)
    batch = before({"observation.state": numbers})
    chunk = theirs.predict_action_chunk(batch, noise=noise)
    with torch.no_grad():
        ours, _ = policy.act({"state": numbers[:, -9:]}, policy.initial(3), noise)
    assert chunk.shape == (3, 4, 4) and torch.equal(chunk, ours)
    assert torch.equal(after(theirs.select_action(batch, noise=noise)), ours[:, 0])
    with pytest.raises(ValueError, match=r"--robot\.numbers"):
        theirs.predict_action_chunk({"observation.state": numbers[:, :3]})


def test_lerobots_rollout_reaches_the_goal(plugins: Path, tmp_path: Path) -> None:
    """Observation, policy and action go through LeRobot; limits and robot are ours."""
    saved(REACH, tmp_path / "run")
    described(tmp_path / "run", tmp_path / "lerobot", plugins, tmp_path)
    settings = json.dumps([f"folder={tmp_path / 'daemon'}", "robot.spin=false"])
    words = [
        sys.executable, "-m", "lerobot.scripts.lerobot_rollout",
        f"--policy.path={tmp_path / 'lerobot'}", "--robot.type=embodied",
        "--robot.robot=so101_sim", f"--robot.settings={settings}", "--robot.actions=controller",
        f"--robot.numbers={json.dumps(NAMES)}", "--robot.fps=20", "--fps=20", "--duration=12",
        f"--robot.python={own_python()}", f"--robot.out={tmp_path / 'out'}",
        "--return_to_initial_position=false", "--play_sounds=false",
    ]  # fmt: skip
    with LimitsWatch(tmp_path / "daemon", reset=False) as watch:
        started(words, plugins, tmp_path)
    watch.require()
    places = so101.forward(np.array(watch.seen))[0]
    assert np.linalg.norm(places - GOAL, axis=1).min() < 0.02
    assert not watch.latched
