"""The squashed normal distribution against torch's own, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.policies.gaussian import Config, Gaussian

SPEC = Spec({"state": Leaf((4,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


@pytest.fixture
def policy() -> Gaussian:
    torch.manual_seed(0)
    return Gaussian(Config(chunk=3, hidden=(32,)), SPEC)


def theirs(policy: Gaussian, obs: dict[str, Tensor]) -> TransformedDistribution:
    mean, log_std = policy(obs)
    normal = Independent(Normal(mean.double(), log_std.double().exp()), 1)
    return TransformedDistribution(normal, [TanhTransform()])


def test_log_probabilities_are_those_of_torch(policy: Gaussian) -> None:
    obs = {"state": torch.randn(50, 4)}
    action, log_prob = policy.sample(obs, 0.5 * policy.sample_noise(50, explore=True))
    assert action.shape == (50, 6) and log_prob.shape == (50,)
    expected = theirs(policy, obs).log_prob(action.detach().double())
    torch.testing.assert_close(log_prob.double(), expected, atol=1e-3, rtol=1e-3)
    again = policy.log_prob(obs, action.detach())
    torch.testing.assert_close(again, log_prob, atol=1e-2, rtol=1e-3)


def test_one_log_probability_by_hand(policy: Gaussian) -> None:
    for parameter in policy.parameters():
        torch.nn.init.zeros_(parameter)  # mean 0, log std the middle of its bounds, -1.5
    noise = torch.zeros(1, 6)
    noise[0, 0] = 2.0
    action, log_prob = policy.sample({"state": torch.zeros(1, 4)}, noise)
    u = 2 * math.exp(-1.5)
    normal = -0.5 * 2**2 + 6 * (1.5 - 0.5 * math.log(2 * math.pi))
    expected = normal - math.log(1 - math.tanh(u) ** 2)
    assert action[0, 0].item() == pytest.approx(math.tanh(u))
    assert log_prob.item() == pytest.approx(expected, rel=1e-5)


def test_far_out_the_density_stays_finite_and_has_a_gradient(policy: Gaussian) -> None:
    obs = {"state": torch.randn(3, 4)}
    action, log_prob = policy.sample(obs, torch.full((3, 6), 100.0))
    assert torch.isfinite(log_prob).all()
    log_prob.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)
    assert torch.isfinite(policy.log_prob(obs, torch.ones(3, 6))).all()
    assert (action.abs() <= 1).all()


def test_acting_is_sampling_with_the_same_noise(policy: Gaussian) -> None:
    obs, noise = {"state": torch.randn(5, 4)}, policy.sample_noise(5, explore=True)
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions.flatten(1), policy.sample(obs, noise)[0])
    assert not policy.sample_noise(5, explore=False).any()


def test_likelihood_learns_the_deviation_and_squared_error_does_not() -> None:
    torch.manual_seed(0)
    wanted = 0.3
    batch = {
        "obs/state": torch.zeros(2000, 4),
        "action": torch.tanh(0.2 + wanted * torch.randn(2000, 1, 2)),
        "valid": torch.ones(2000, 1, dtype=torch.bool),
    }
    deviations = {}
    for kind in ("nll", "mse"):
        policy = build(
            {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8], "imitate": kind},
            Policy,
            spec=SPEC,
        )
        adam = torch.optim.Adam(policy.parameters(), lr=0.02)
        for _ in range(200):
            adam.zero_grad()
            policy.loss(batch).mean().backward()
            adam.step()
        mean, log_std = policy({"state": torch.zeros(1, 4)})
        assert (mean - 0.2).abs().max() < 0.05
        deviations[kind] = log_std.exp()
    assert (deviations["nll"] - wanted).abs().max() < 0.03
    assert (deviations["mse"] - wanted).abs().min() > 0.03


def test_a_head_of_zeros_starts_at_the_middle() -> None:
    policy = Gaussian(Config(zero_head=True), SPEC)
    actions, _ = policy.act({"state": torch.randn(3, 4)}, {}, policy.sample_noise(3))
    assert torch.equal(actions, torch.zeros(3, 1, 2))


def test_hard_bounds_are_clamped() -> None:
    policy = Gaussian(Config(hidden=(), log_std=(-20.0, 2.0), soft=False), SPEC)
    for parameter in policy.parameters():
        torch.nn.init.zeros_(parameter)
    assert policy({"state": torch.zeros(1, 4)})[1].tolist() == [[0.0, 0.0]]  # a deviation of 1
    torch.nn.init.constant_(policy.net[-1].bias, 3.0)
    assert policy({"state": torch.zeros(1, 4)})[1].tolist() == [[2.0, 2.0]]
