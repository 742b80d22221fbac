"""A LeRobot checkpoint, adopted, and deployed on the simulated FR3 as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied import cli
from embodied.core import checkpoint
from embodied.datasets.lerobot.reader import read_episodes
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from tests.adopt.checkpoints import ENV as OBJECTS
from tests.adopt.checkpoints import STATE, random_weights, resized, two_gap_mapping
from tests.real_robot.test_deploy import CROWDED, said, start


def adopted(where: Path, case: str) -> Path:
    """A run of the checkpoint `case`, with the observations and actions of env=fr3_reach."""
    spec = Fr3(Fr3Config(task="reach", num_envs=1)).spec
    seen = spec.obs["state"].size
    sizes = {STATE: seen, OBJECTS: seen, "action": spec.act.size}
    folder = random_weights(resized(case, where / "lerobot", sizes))
    mapping = two_gap_mapping(where / "names.yaml")  # the state, twice
    words = ["env=fr3_reach", f"mapping={mapping}", f"out={where / 'base'}"]
    args = cli.parse(["adopt", str(folder), *words, *["steps=2"] * case.startswith("diffusion")])
    args.run(args)
    return where / "base"


@pytest.mark.parametrize("case", ["act_numbers", "diffusion_numbers"])
def test_an_adopted_policy_drives_the_arm(tmp_path: Path, folder: Path, case: str) -> None:
    """Its weights are random: it gets nowhere, but the arm follows what it says."""
    run = adopted(tmp_path, case)
    words = ("robot=sim", f"policy={run}", CROWDED, "seconds=2", "robot.blend=0")
    deploy = start(tmp_path, folder, *words)
    text = said(deploy)
    assert deploy.returncode == 0, text
    assert "FAIL" not in text and "ok   actions       dx, dy, dz, gripper" in text
    rows = read_episodes(tmp_path / "out" / "recording").steps
    assert len(rows["action"]) > 20 and rows["action"].abs().max() > 0
    assert not rows["intervened"].any()
    if case == "act_numbers":  # it needs neither noise nor a history
        policy = checkpoint.load_policy(run)
        noise = torch.zeros(1, *policy.sample_noise(1).shape[1:])
        for k in range(5, 10):
            obs = {"state": rows["decided/state"][k : k + 1]}
            chunk, _ = policy.act(obs, policy.initial(1), noise)
            apart = (chunk[0] - rows["action"][k]).abs().amax(1)
            assert apart.min() < 1e-4, "one of the chunk that it decided upon"
