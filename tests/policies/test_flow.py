"""Flow matching's integration and its loss, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embodied.core.spec import Leaf, Spec
from embodied.policies.generative.flow import Config, Flow

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def test_acting_is_euler_on_the_left_grid() -> None:
    torch.manual_seed(0)
    policy = Flow(Config(chunk=2, steps=4, width=16), SPEC)
    obs, noise = {"state": torch.randn(5, 2)}, 0.3 * policy.sample_noise(5)
    x, features = noise, policy.encoder(obs)
    for t in (0.0, 0.25, 0.5, 0.75):
        x = x + 0.25 * policy.net(x, torch.full((5,), t), features)
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions, x.clamp(-1, 1)[:, :, None])


def test_a_velocity_of_t_is_summed_as_the_left_grid_does(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Flow(Config(chunk=1, steps=4), SPEC)
    monkeypatch.setattr(policy, "embedded", lambda: policy.times()[:, None])
    monkeypatch.setattr(policy.net, "at", lambda x, time, features: time.expand(len(x), 1))
    actions, _ = policy.act({"state": torch.zeros(1, 2)}, {}, torch.zeros(1, 1))
    assert actions.item() == 0.25 * (0.0 + 0.25 + 0.5 + 0.75)


def test_the_right_velocity_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data at one point c, the velocity (c - x) / (1 - t) is exact."""
    policy = Flow(Config(chunk=2), SPEC)

    def exact(x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        return (0.4 - x) / (1 - t[:, None])

    monkeypatch.setattr(policy.net, "forward", exact)
    batch = {
        "obs/state": torch.zeros(50, 2),
        "action": torch.full((50, 2, 1), 0.4),
        "valid": torch.ones(50, 2, dtype=torch.bool),
    }
    assert policy.loss(batch).max() < 1e-6


def test_actions_return_from_the_range_of_the_data() -> None:
    policy = Flow(Config(chunk=2), SPEC)
    action = torch.tensor([[[0.1], [0.3]], [[0.2], [0.5]]])
    policy.fit({"obs/state": torch.randn(2, 2), "action": action})
    # 0.1 .. 0.5 onto -1 .. 1: middle 0.3, radius 0.2.
    torch.testing.assert_close(policy.range(action).flatten(), torch.tensor([-1, 0, -0.5, 1.0]))
    torch.testing.assert_close(policy.to_actions(policy.range(action).flatten(1)), action)
    extremes = policy.act({"state": torch.zeros(9, 2)}, {}, 50 * policy.sample_noise(9))[0]
    assert extremes.min() >= 0.1 - 1e-6 and extremes.max() <= 0.5 + 1e-6
