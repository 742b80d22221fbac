"""Beta policy: densities against torch, samples against exact moments, the mean in evaluation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.spec import NORMALIZED, Leaf, Spec
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy.ppo import Ppo
from embodied.policies.diagonal_beta import TRIES, DiagonalBeta, gamma
from tests.builders import make_policy

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make(spec: Spec = SPEC, **settings: Any) -> DiagonalBeta:
    return make_policy("diagonal_beta.DiagonalBeta", spec, **{"hidden": [8], **settings})


def theirs(policy: DiagonalBeta, obs: dict[str, Tensor]) -> torch.distributions.Distribution:
    """2 x - 1 with x ~ Beta, by torch."""
    alpha, beta = policy(obs).unbind(2)
    base = torch.distributions.Beta(alpha, beta)
    affine = torch.distributions.AffineTransform(-1.0, 2.0)
    return torch.distributions.TransformedDistribution(base, [affine])


def test_log_prob_and_entropy_are_torchs_with_their_gradients() -> None:
    policy = make(head=2.0)
    obs = {"state": torch.randn(7, 3)}
    action, weight = 1.9 * torch.rand(7, 2) - 0.95, torch.randn(7)
    alpha, beta = policy(obs).unbind(2)
    entropy = torch.distributions.Beta(alpha, beta).entropy().sum(1) + 2 * math.log(2)
    found: list[list[Tensor]] = []
    density = theirs(policy, obs).log_prob(action).sum(1)
    for one, other in (policy.evaluate_actions(obs, action), (density, entropy)):
        loss = (one * weight).sum() + 3 * other.mean()
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
        found.append([one, other, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_the_density_integrates_to_one() -> None:
    spec = Spec(SPEC.obs, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
    policy = make(spec, head=2.0)
    grid = torch.linspace(-1, 1, 20_001)[:, None]
    obs = {"state": torch.randn(1, 3).expand(len(grid), 3)}
    density = policy.log_prob(obs, grid).exp()
    assert torch.trapezoid(density, grid[:, 0]).item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("shape", [1.0, 1.7, 6.0, 200.0])
def test_gamma_samples_have_the_distribution(shape: float) -> None:
    """Kolmogorov and Smirnov's distance to the exact distribution, at a level of 0.1%."""
    torch.manual_seed(1)
    n = 20_000
    noise = torch.stack([torch.randn(n, TRIES), 1 - torch.rand(n, TRIES)], 2)
    drawn = gamma(torch.full((n,), shape), noise).double().sort().values
    exact = torch.special.gammainc(torch.full((n,), shape, dtype=torch.float64), drawn)
    ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (exact - ranks).abs().max().item() < 1.95 / math.sqrt(n)


def test_samples_have_the_policys_moments() -> None:
    policy = make(head=2.0)
    obs = {"state": torch.randn(1, 3).expand(50_000, 3)}
    with torch.no_grad():
        action, _ = policy.act(obs, {}, policy.sample_noise(50_000, explore=True))
        exact = theirs(policy, obs)
        drawn = exact.sample()
    assert action.abs().max() <= 1
    torch.testing.assert_close(action[:, 0].mean(0), drawn.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(action[:, 0].std(0), drawn.std(0), atol=0.01, rtol=0)


def test_the_mean_acts_in_evaluation() -> None:
    policy = make(head=2.0).eval()
    obs = {"state": torch.randn(5, 3)}
    action = Actor(policy, 5)(obs, torch.ones(5, dtype=torch.bool))
    alpha, beta = policy(obs).unbind(2)
    torch.testing.assert_close(action, (2 * alpha / (alpha + beta) - 1).detach())
    mode = 2 * (alpha - 1) / (alpha + beta - 2) - 1
    assert (action - mode).abs().max() > 0.01


def test_part_of_a_chunk() -> None:
    policy = make(chunk=3, head=2.0)
    obs, action = {"state": torch.randn(4, 3)}, 2 * torch.rand(4, 6) - 1
    density, entropy = policy.evaluate_actions(obs, action[:, :2])
    alpha, beta = policy(obs)[:, :2].unbind(2)
    exact = torch.distributions.Beta(alpha, beta)
    expected = exact.log_prob((action[:, :2] + 1) / 2).sum(1) - 2 * math.log(2)
    torch.testing.assert_close(density, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entropy, exact.entropy().sum(1) + 2 * math.log(2))


def test_actions_at_the_bounds_have_finite_densities() -> None:
    policy = make(head=2.0)
    density, _ = policy.evaluate_actions(
        {"state": torch.zeros(2, 3)}, torch.tensor([[-1.0, 1.0]] * 2)
    )
    assert density.isfinite().all()


def test_actions_without_bounds_are_refused() -> None:
    for leaf, match in (
        (Leaf((2,), unit=NORMALIZED), "actions have bounds"),
        (Leaf((), "int64", low=0, high=3), "continuous actions"),
    ):
        with pytest.raises(ConfigError, match=match):
            make(Spec(SPEC.obs, leaf, dt=0.1))


def test_ppo_trains_it_without_native_code() -> None:
    """Rewarded for actions near (0.5, -0.5), its mean goes there; the report names the reason."""
    policy = make()
    settings = {"horizon": 1, "batch_size": 256, "epochs": 4, "lr": 0.01, "value": {"hidden": [8]}}
    node = {"_target_": "embodied.learners.on_policy.ppo.Ppo", **settings}
    learner = build(node, Ppo, policy=policy, spec=SPEC, run=RunPlan(decisions=1))
    accelerate(learner, native=True)
    assert native_obstacle(learner) == "the policy is DiagonalBeta, not DiagonalGaussian"
    obs = torch.zeros(1, 256, 3)
    flags = {"ended": torch.ones(1, 256, dtype=torch.bool)}
    flags |= {"valid": flags["ended"], "first": flags["ended"]}
    kls: list[float] = []
    for _ in range(30):
        with torch.no_grad():
            action, _ = policy.act({"state": obs[0]}, {}, policy.sample_noise(256, explore=True))
        reward = -(action - torch.tensor([0.5, -0.5])).square().sum((1, 2))[None]
        batch = {"obs/state": obs, "next_obs/state": obs, "action": action[:, 0][None]}
        batch |= {"reward": reward, "discount": torch.zeros(1, 256), **flags}
        kls.append(float(learner.update(batch)["kl"]))
    mean, _ = policy.act({"state": obs[0, :1]}, {}, policy.sample_noise(1))
    torch.testing.assert_close(mean[0, 0], torch.tensor([0.5, -0.5]), atol=0.15, rtol=0)
    assert 0 < max(kls) < 0.2
