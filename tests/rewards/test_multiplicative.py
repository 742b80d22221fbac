"""The multiplicative reward by hand, and that a held penalty follows the observed clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.rewards.handcrafted.factors import fading, held, within
from tests.rewards.rows import make

TARGET = "embodied.rewards.handcrafted.factors.Multiplicative"
NAMES = ("gain", "over", "off", "hit", "since_a", "since_b")
SPEC = Spec({"state": Leaf((6,), names=NAMES)}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
NODE: dict[str, Any] = {
    "_target_": TARGET,
    "progress": {"of": "value", "a": "gain"},
    "factors": {
        "speeding": {"of": "fading", "a": "over", "scale": 2.0},
        "centre": {"of": "within", "a": "off", "limit": 0.5, "otherwise": 0.5},
        "comfort": {"of": "held", "a": "since_a,since_b", "seconds": 5.0},
    },
    "penalties": {"collision": {"of": "value", "a": "hit", "weight": 3.0}},
    "scale": 10.0,
}


def rows(*then: list[float]) -> dict[str, Tensor]:
    following = torch.tensor(then)
    now = torch.full_like(following, 9.0)  # must not matter
    reward = torch.full((len(then),), 7.0)
    return {"obs/state": now, "next_obs/state": following, "reward": reward}


def test_by_hand() -> None:
    reward = make(NODE, SPEC)
    given = rows(
        [0.4, 0.0, 0.2, 0.0, 9.0, 9.0],  # nothing is broken: 0.4
        [0.4, 0.5, 0.6, 0.0, 9.0, 1.0],  # 0.4 x 0.75 x 0.5 x 0.75
        [0.4, 3.0, 0.2, 0.0, 9.0, 9.0],  # far too fast
        [0.4, 0.0, 0.2, 1.0, 0.0, 0.0],  # 0.4 x 0.5 - 3
    )
    expected = torch.tensor([4.0, 1.125, 0.0, -28.0])
    torch.testing.assert_close(reward(given), expected)
    parts = reward.components(given)
    torch.testing.assert_close(parts["progress"] + parts["collision"], expected)
    assert parts["collision"].tolist() == [0.0, 0.0, 0.0, -30.0] and reward.frozen


def test_factors() -> None:
    values = torch.tensor([[0.0], [1.0], [2.5]])
    assert within(values, 1.0).tolist() == [1.0, 1.0, 0.0]
    assert fading(values, 2.0).tolist() == [1.0, 0.5, 0.0]
    assert held(values, 2.0, 0.2).tolist() == pytest.approx([0.2, 0.2, 1.0])
    assert held(torch.tensor([[0.0, 9.0, 9.0, 9.0]]), 1.0).tolist() == [0.875]


def test_a_factor_cannot_exceed_one() -> None:
    node = {**NODE, "factors": {"speeding": {**NODE["factors"]["speeding"], "weight": 2.0}}}
    with pytest.raises(ConfigError, match=r"reward\.factors\.speeding\.weight is 2"):
        make(node, SPEC)


def test_a_penalty_is_held_for_five_seconds_in_drive() -> None:
    """One harsh brake: the comfort factor is below 1 for 50 steps of 0.1 s, and then 1 again."""
    env = build(
        {"_target_": "embodied.envs.toy.drive.Drive", "num_envs": 1, "obstacles": 0}, VecEnv
    )
    with open("configs/reward/multiplicative.yaml") as file:
        node = yaml.safe_load(file)
    comfort = make(node, env.spec).factors["comfort"]
    env.reset(0)
    seen: list[float] = []
    for step in range(60):
        following = env.step(torch.tensor([[-1.0 if step == 0 else 0.0, 0.0]])).next_obs
        given = {f"next_obs/{name}": value for name, value in following.items()}
        seen.append(float(comfort(given)))
    last = max(step for step, value in enumerate(seen) if value < 1)
    broken = [step for step, value in enumerate(seen[:6]) if value == min(seen)]
    assert seen[0] < 1 and last < 59 and last - broken[0] in range(49, 55)
