"""A reward that grows with training: weights by hand, old rows rewarded anew."""

from __future__ import annotations

import pytest
import torch

from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.source import Relabel
from embodied.core.build import ConfigError, build
from embodied.core.reward import Reward, Scheduled
from embodied.envs.quadrotor.rewards import hover_rows
from embodied.rewards.handcrafted.composite import ScheduledWeights

NODE = {
    "_target_": "embodied.rewards.handcrafted.composite.ScheduledWeights",
    "function": "embodied.envs.quadrotor.rewards.hover_rows",
    "start": {"position": 5.0, "velocity": 0.01, "action": 0.01},
    "factor": {"position": 1.2, "velocity": 1.4, "action": 1.4},
    "limit": {"position": 40.0, "velocity": 1.0, "action": 1.0},
}


def test_weights_at_each_bump() -> None:
    reward = build(NODE, Reward)
    assert isinstance(reward, ScheduledWeights) and isinstance(reward, Scheduled)
    for step, position, velocity in (
        (0, 5.0, 0.01),
        (99_999, 5.0, 0.01),
        (100_000, 6.0, 0.014),
        (299_999, 7.2, 0.0196),
        (10_000_000, 40.0, 1.0),
        (10, 5.0, 0.01),
    ):
        reward.set_step(step)
        assert reward.weights["position"] == pytest.approx(position)
        assert reward.weights["velocity"] == pytest.approx(velocity)
        assert float(reward.update({})["position"]) == pytest.approx(position)


def rows() -> dict[str, torch.Tensor]:
    state = torch.zeros(2, 28)
    state[:, 3:12:4] = 1.0
    state[:, 0] = 0.5
    return {
        "obs/critic/state": state,
        "action": torch.zeros(2, 4),
        "discount": torch.tensor([0.99, 0.0]),
        "reward": torch.tensor([7.0, 7.0]),
    }


def test_stored_rows_are_rewarded_with_the_weights_of_now() -> None:
    """r = 2 - 1/2 (w_p 0.25 + w_a 4 * 0.334^2); a row that ended the world has none."""
    replay, reward = ReplayBuffer(4), build(NODE, Reward)
    replay.add(rows())
    source = Relabel(replay, reward)
    for step, position, action in ((0, 5.0, 0.01), (200_000, 7.2, 0.0196)):
        reward.set_step(step)
        batch = source.sample(64)
        expected = 2 - 0.5 * (position * 0.25 + action * 4 * 0.334053**2)
        alive = batch["discount"] > 0
        assert alive.any() and not alive.all()
        torch.testing.assert_close(batch["reward"], expected * alive)
    assert replay.sample(1)["reward"] == 7.0


def test_a_tilt_costs_its_share() -> None:
    """A quarter turn about x: q_w^2 = 1/2, R = diag(1, 0, 0) and +-1 off the diagonal."""
    tilted = rows()
    tilted["obs/critic/state"][:, 0] = 0
    tilted["obs/critic/state"][:, 3:12] = torch.tensor([1.0, 0, 0, 0, 0, -1, 0, 1, 0])
    weights = {"position": 40.0, "velocity": 1.0, "action": 0.0}
    assert float(hover_rows(tilted, weights)[0]) == pytest.approx(2 - 0.5 * 5 * 0.5)


def test_settings_reach_the_function() -> None:
    """At the level of another vehicle the same action is no effort."""
    reward = build(NODE | {"settings": {"level": 0.0}}, Reward)
    expected = 2 - 0.5 * 5.0 * 0.25
    assert float(reward(rows())[0]) == pytest.approx(expected)


def test_a_weight_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no speed"):
        build(NODE | {"factor": {"speed": 2.0}}, Reward)
