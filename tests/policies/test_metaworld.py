"""The scripted demonstrators of MetaWorld solve their tasks, and need a goal that is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from tests.builders import node_of

pytest.importorskip("envpool")

FILES = sorted(Path("configs/demonstrator").glob("envpool_metaworld_*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_solves_its_task(file: Path) -> None:
    node = yaml.safe_load((Path("configs/env") / file.name).read_text())
    env = build(node | {"num_envs": 10}, VecEnv)
    policy = build(yaml.safe_load(file.read_text()), Policy, spec=env.spec)
    obs, carry = env.reset(seed=2), policy.initial(10)
    assert obs["state"][:, 36:39].abs().sum(1).min() > 0.1, "the goal is shown"
    done = torch.zeros(10, dtype=torch.bool)
    torch.manual_seed(0)
    for _ in range(150):
        action, carry = policy.act(obs, carry, policy.sample_noise(10))
        step = env.step(action[:, 0])
        obs, done = step.obs, done | step.log["success"]
        if done.all():
            break
    assert done.sum() >= 9
    env.close()


def test_a_puck_that_is_lost_is_reached_for_again() -> None:
    spec = Spec({"state": Leaf((39,))}, Leaf((4,), low=-1.0, high=1.0), 0.0125)
    node = node_of("policies.scripted.metaworld.Scripted", task="push", unsteady=0.0)
    policy = build(node, Policy, spec=spec)
    state = torch.zeros(2, 39)
    state[:, 4:7] = torch.tensor([0.0, 0.6, 0.02])  # the puck
    state[:, 0:3] = torch.tensor([[0.0, 0.6, 0.05], [0.2, 0.6, 0.05]])  # the hand
    state[:, 36:39] = torch.tensor([0.1, 0.8, 0.02])
    carry = {"stage": torch.tensor([3, 3]), "since": torch.tensor([5, 5])}
    action, carry = policy.act({"state": state}, carry, torch.zeros(2, 3))
    assert carry["stage"].tolist() == [3, 0] and action[:, 0, 3].tolist() == [1, -1]
    assert action[0, 0, 0] > 0 > action[1, 0, 0], "to the goal; back to the puck"
    with pytest.raises(ConfigError, match="reach, push, pick_place, door_open, drawer_open"):
        build(node | {"task": "fly"}, Policy, spec=spec)
