"""Generative policies keep the shares of two modes; a mean cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import build
from embodied.core.spec import Leaf, Spec
from embodied.learners.imitate import Config, Imitate

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
SHARE, ROWS = 0.3, 4096
NODES: list[dict[str, Any]] = [
    {"_target_": "policies.flow.Flow", "steps": 8},
    {"_target_": "policies.diffusion.Diffusion", "steps": 10},
]


@pytest.mark.parametrize("node", NODES, ids=["flow", "diffusion"])
def test_both_modes_keep_their_share(node: dict[str, Any]) -> None:
    torch.manual_seed(0)
    left = torch.rand(ROWS, 1) < SHARE
    action = torch.where(left, -0.6, 0.6) + 0.05 * torch.randn(ROWS, 1)
    rows = {
        "obs/state": torch.zeros(ROWS, 1),
        "action": action[:, None],
        "valid": torch.ones(ROWS, 1, dtype=torch.bool),
    }
    policy = build({**node, "chunk": 1, "width": 64}, spec=SPEC)
    learner = Imitate(Config(batch_size=256, lr=2e-3), policy, total_steps=1000)
    learner.fit(rows)
    for _ in range(1000):
        index = torch.randint(ROWS, (256,))
        learner.update({key: value[index] for key, value in rows.items()})
    with torch.no_grad():
        noise = learner.policy.draw(4000)
        played = learner.policy.act({"state": torch.zeros(4000, 1)}, {}, noise)[0].flatten()
    assert abs((played < 0).float().mean() - left.float().mean()) < 0.05
    assert ((played.abs() - 0.6).abs() < 0.25).float().mean() > 0.9
