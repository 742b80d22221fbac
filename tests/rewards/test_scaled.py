"""Rewards are scaled in what is stored, and nowhere else."""

from __future__ import annotations

import torch

from embodied.core.build import build
from embodied.core.reward import Reward


def test_rewards_are_multiplied() -> None:
    scaled = build(
        {"_target_": "embodied.rewards.handcrafted.composite.Scaled", "factor": 0.1}, Reward
    )
    rows = {"reward": torch.tensor([10.0, -5.0])}
    torch.testing.assert_close(scaled(rows), torch.tensor([1.0, -0.5]))
    assert rows["reward"].tolist() == [10.0, -5.0]
    assert scaled.frozen and scaled.update(rows) == {}
