"""A policy of ours as LeRobot's: the same actions, and its rollout command reaches a goal."""

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
from embodied.embodiments import so101
from tests.builders import node_of
from tests.interop.adversary import environment, installed, own_python
from tests.interop.limits_watch import LimitsWatch

pytest.importorskip("lerobot", reason="LeRobot is not installed here: sh scripts/interop.sh")
pytestmark = pytest.mark.usefixtures("idle_machine")

NAMES = tuple(f"{what}_{axis}" for what in ("tool", "lead", "goal") for axis in "xyz")
ACTIONS = ("dx", "dy", "dz", "gripper")
REACH = node_of("policies.scripted.fr3.Scripted", task="reach", quality=1.0, step=0.015)
GOAL = (0.26, 0.1, 0.1)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("installed"))


def saved(made: Node, folder: Path) -> Policy:
    obs = {"state": Leaf((9,), names=NAMES)}
    act = Leaf((4,), low=-1.0, high=1.0, names=ACTIONS)
    policy = build(made, Policy, spec=Spec(obs=obs, act=act, dt=0.05)).eval()
    checkpoint.save(folder / "checkpoints" / "00000000", policy, 0)
    return policy


def described(run: Path, out: Path, plugins: Path, folder: Path) -> str:
    words = [sys.executable, "-m", "lerobot_policy_embodied", str(run), f"out={out}"]
    done = subprocess.run(words, env=environment(plugins, folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
        done = subprocess.run(
            words, env=environment(plugins, tmp_path), capture_output=True, text=True, timeout=280
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    watch.require()
    places = so101.forward(np.array(watch.seen))[0]
    assert np.linalg.norm(places - GOAL, axis=1).min() < 0.02
    assert not watch.latched
