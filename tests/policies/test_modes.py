"""Generative policies keep the shares of two modes; a mean cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.learners.imitation.behavior_cloning import BehaviorCloning, Config
from embodied.learners.learner import RunPlan

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
SHARE, ROWS = 0.3, 4096
NODES: list[dict[str, Any]] = [
    {"_target_": "embodied.policies.generative.flow.Flow", "steps": 8},
    {"_target_": "embodied.policies.generative.diffusion.Diffusion", "steps": 10},
    {"_target_": "embodied.policies.generative.shortcut.Shortcut", "steps": 1},
    {"_target_": "embodied.policies.generative.shortcut.Shortcut", "steps": 8},
    {"_target_": "embodied.policies.generative.consistency.Consistency", "steps": 1},
]


def trained(node: dict[str, Any], updates: int) -> tuple[Tensor, float]:
    """4,000 actions of a policy that was shown -0.6 (SHARE of the time) and 0.6, and the share."""
    torch.manual_seed(0)
    left = torch.rand(ROWS, 1) < SHARE
    action = torch.where(left, -0.6, 0.6) + 0.05 * torch.randn(ROWS, 1)
    rows = {
        "obs/state": torch.zeros(ROWS, 1),
        "action": action[:, None],
        "valid": torch.ones(ROWS, 1, dtype=torch.bool),
    }
    policy = build({**node, "chunk": 1, "width": 64}, Policy, spec=SPEC)
    learner = BehaviorCloning(Config(batch_size=256, lr=2e-3), policy, run=RunPlan(updates))
    learner.fit(rows)
    for _ in range(updates):
        index = torch.randint(ROWS, (256,))
        learner.update({key: value[index] for key, value in rows.items()})
    with torch.no_grad():
        noise = learner.policy.sample_noise(4000)
        played = learner.policy.act({"state": torch.zeros(4000, 1)}, {}, noise)[0].flatten()
    return played, left.float().mean().item()


def near(played: Tensor) -> float:
    """How many are near one of the two."""
    return ((played.abs() - 0.6).abs() < 0.25).float().mean().item()


@pytest.mark.parametrize("node", NODES, ids=lambda n: f"{n['_target_'].split('.')[1]}-{n['steps']}")
def test_both_modes_keep_their_share(node: dict[str, Any]) -> None:
    played, share = trained(node, 1000)
    assert abs((played < 0).float().mean() - share) < 0.05
    # One step draws a line between the modes, many steps a point.
    assert near(played) > (0.8 if node["steps"] == 1 else 0.9)


def test_one_step_of_plain_flow_is_the_mean() -> None:
    """0.3 * -0.6 + 0.7 * 0.6 = 0.24: why there are shortcuts."""
    played, _ = trained({"_target_": "embodied.policies.generative.flow.Flow", "steps": 1}, 500)
    assert near(played) < 0.2
    assert abs(played.mean() - 0.24) < 0.08 and played.std() < 0.2
