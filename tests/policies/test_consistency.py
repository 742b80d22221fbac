"""Consistency: the map, its renoised steps and its loss, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.policies.generative.consistency import Config, Consistency
from tests.builders import node_of

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(**settings: Any) -> Consistency:
    torch.manual_seed(0)
    return Consistency(Config(**{"chunk": 2, "width": 16, **settings}), SPEC)


def rows(n: int) -> dict[str, Tensor]:
    valid = torch.ones(n, 2, dtype=torch.bool)
    return {"obs/state": torch.zeros(n, 2), "action": torch.full((n, 2, 1), 0.4), "valid": valid}


def test_one_step_is_noise_plus_network() -> None:
    policy = make()
    obs, noise = {"state": torch.randn(5, 2)}, 0.3 * policy.sample_noise(5)
    x = noise + policy.net(noise, torch.zeros(5), policy.encoder(obs))
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions, x.clamp(-1, 1)[:, :, None], atol=1e-6, rtol=1e-5)


def test_further_steps_noise_again() -> None:
    policy = make(steps=2)
    obs, noise = {"state": torch.randn(5, 2)}, policy.sample_noise(5)
    assert noise.shape == (5, 4)
    z, fresh = noise.split(2, 1)
    features = policy.encoder(obs)
    x = policy.clean(z, torch.zeros(5), features).clamp(-1, 1)
    x = policy.clean(0.5 * fresh + 0.5 * x, torch.full((5,), 0.5), features).clamp(-1, 1)
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions[:, :, 0], x, atol=1e-6, rtol=1e-5)


def test_the_data_is_its_own_image() -> None:
    policy, x = make(), torch.rand(4, 2)
    assert torch.equal(policy.clean(x, torch.ones(4), torch.zeros(4, 2)), x)


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """net = b: f_t - f_s = (x_1 - z) (t - s) + b (s - t) = (b - (x_1 - z)) / N."""
    policy = make(levels=5)
    monkeypatch.setattr(policy.net, "forward", lambda x, t, features: torch.full_like(x, 2.0))
    torch.manual_seed(5)
    loss = policy.loss(rows(50))
    torch.manual_seed(5)
    z, level = torch.randn(50, 2), torch.randint(5, (50,))
    assert set(level.tolist()) == {0, 1, 2, 3, 4}
    error = ((2 - (0.4 - z)) / 5).square().mean(1)
    torch.testing.assert_close(loss, error / (1.05 - level / 5))


def test_the_right_map_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make()
    monkeypatch.setattr(
        policy.net, "forward", lambda x, t, f: (0.4 - x) / (1 - t).clamp(min=1e-6)[:, None]
    )
    assert policy.loss(rows(100)).max() < 1e-9


def test_only_the_noisier_side_learns() -> None:
    """Over one level, f(x_s, s) is the data itself and the gradient that of plain regression."""
    policy = make(levels=1)
    batch = rows(8)
    torch.manual_seed(1)
    policy.loss(batch).sum().backward()
    found = [p.grad.clone() for p in policy.net.parameters() if p.grad is not None]
    policy.zero_grad()
    torch.manual_seed(1)
    z = torch.randn(8, 2)
    f = z + policy.net(z, torch.zeros(8), policy.encoder({"state": batch["obs/state"]}))
    ((f - 0.4).square().mean(1) / 1.05).sum().backward()
    expected = [p.grad for p in policy.net.parameters() if p.grad is not None]
    torch.testing.assert_close(found, expected)


def test_steps_that_do_not_fit_are_refused() -> None:
    node = node_of("policies.generative.consistency.Consistency", steps=9, levels=8)
    with pytest.raises(ConfigError, match="steps=9 must be at most levels=8"):
        build(node, Policy, spec=SPEC)
