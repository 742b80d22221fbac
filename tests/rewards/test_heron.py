"""Preferences by hand at every level; the model ranks as the order of importance does."""

from __future__ import annotations

import math

import torch

from embodied.rewards.preferences.bradley_terry import Heron, preference_loss, preferences
from tests.rewards.rows import drawn, make

NODE = {
    "_target_": "embodied.rewards.preferences.bradley_terry.Heron",
    "factors": [
        {"of": "above", "a": "goal_x", "than": 1.0, "margin": 0},
        {"of": "distance", "a": "tool", "b": "cube", "weight": -1, "margin": 0.5},
        {"of": "effort", "a": "other", "weight": -1, "margin": 0.1},
    ],
    "leaves": ["state"],
    "hidden": [64, 64],
    "every": 1,
}


def test_each_level_has_its_own_margin() -> None:
    """Margins 0, 1, 0.1: success decides; else distance if it differs by more than 1; else effort
    if by more than 0.1 (with level two's margin it would not); else nobody wins."""
    one = torch.tensor([[1.0, 5.0, 0.0], [0.0, 3.0, 0.0], [0.0, 3.0, 0.5], [0.0, 3.0, 0.05]])
    other = torch.tensor([[0.0, 9.0, 9.0], [0.0, 1.5, 9.0], [0.0, 2.5, 0.0], [0.0, 2.5, 0.0]])
    margins = torch.tensor([0.0, 1.0, 0.1])
    wins, level = preferences(one, other, margins)
    assert wins.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert level.tolist() == [0, 1, 2, -1]
    back, again = preferences(other, one, margins)
    assert back.tolist() == [-1.0, -1.0, -1.0, 0.0] and again.tolist() == level.tolist()


def test_preferences_are_not_transitive_near_a_margin() -> None:
    values = torch.tensor([[0.0, 3.0], [0.8, 2.0], [1.6, 1.0]])
    margins = torch.tensor([1.0, 0.0])
    wins, _ = preferences(values[[0, 1, 0]], values[[1, 2, 2]], margins)
    assert wins.tolist() == [1.0, 1.0, -1.0]


def test_the_loss_by_hand() -> None:
    """Scores 0, 1, 3: the first loses to the second (softplus(-1)), the third to the second by
    label (softplus(2)); a tie does not count. Huge differences stay finite."""
    scores, first = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0, 1, 2])
    second, wins = torch.tensor([1, 2, 0]), torch.tensor([-1.0, 1.0, 0.0])
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(2))) / 2
    loss = preference_loss(scores, first, second, wins)
    assert abs(loss.item() - expected) < 1e-6
    far = preference_loss(1e4 * scores, first, second, wins)
    assert math.isfinite(far.item())


def test_the_model_ranks_as_the_order_does() -> None:
    """On rows that it has not seen, over nine of ten pairs; and it is the reward."""
    reward = make(NODE)
    assert isinstance(reward, Heron)
    for seed in range(60):
        metrics = reward.update(drawn(256, seed))
    fresh = drawn(512, 10_000)
    values = torch.stack([factor(fresh) for factor in reward.factors], 1)
    first, second = torch.arange(512), (torch.arange(512) + 200) % 512
    wins, level = preferences(
        values[first], values[second], reward.margins * reward.factor_moments.std
    )
    paid = reward.score(fresh)
    right = ((paid[first] - paid[second]) * wins > 0)[wins != 0].float().mean()
    assert right > 0.9
    assert abs(metrics["accuracy"].item() - right.item()) < 0.1
    assert (level == 0).any() and (level == 1).any()
    assert (reward(fresh) <= 0).all() and reward(fresh).std() > 0.3
    better, worse = reward(fresh)[first][wins > 0], reward(fresh)[second][wins > 0]
    assert better.mean() > worse.mean() + 0.5


def test_the_other_way_round_is_another_reward() -> None:
    """Success last and effort first: the model no longer cares for success."""
    turned = NODE | {"factors": list(reversed(NODE["factors"])), "leaves": ["state", "other"]}
    reward = make(turned | {"level": "centred", "weight": 2.0})
    for seed in range(25):
        rows = drawn(256, seed)
        rows["next_obs/other"] = torch.randn(256, 2, generator=torch.Generator().manual_seed(seed))
        reward.update(rows)
    paid = reward(rows)
    effort = rows["next_obs/other"].square().mean(1)
    assert torch.corrcoef(torch.stack([paid, effort]))[0, 1] < -0.6
    assert abs(paid.mean()) < 0.3 and abs(paid.std() - 2) < 0.3
