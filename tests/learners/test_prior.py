"""A prior over actions: its divergence by hand, the optimum in closed form, PPO's part."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.tensors import each
from embodied.learners.prior import PriorConfig, prior_of
from tests.builders import LINE, SPEC, make_learner, make_policy, still
from tests.contract.test_learner import segment
from tests.learners.bandit import slopes

ZERO = {"state": torch.zeros(4000, 1)}


def gaussian(std: float, mean: float) -> Any:
    """A policy on a line with one mean and, at the start, one deviation everywhere."""
    bounds = [math.log(std) - 2, math.log(std) + 2]
    policy = make_policy("gaussian.Gaussian", LINE, hidden=[16], log_std=bounds, zero_head=True)
    policy.net[-1].bias.data[0] = mean
    return policy


def make(policy: Any, **settings: Any) -> Any:
    given = {"hidden": (), "actor_lr": 1e-2, **settings}
    return make_learner("prior.SacPrior", policy, **given)


def test_the_divergence_by_hand() -> None:
    learner = make(gaussian(0.4, 0.1), prior_std=[0.2, 0.2])
    learner.prior_policy = gaussian(0.4, 0.3).requires_grad_(False)
    torch.manual_seed(0)
    _, gap = learner.drawn(ZERO)
    exact = math.log(0.2 / 0.4) + (0.4**2 + 0.2**2) / (2 * 0.2**2) - 0.5
    assert gap.mean().item() == pytest.approx(exact, abs=0.15)
    action, gap = learner.drawn({"state": torch.zeros(50, 1)})
    own = learner.policy.log_prob({"state": torch.zeros(50, 1)}, action)
    z, log_std = (torch.atanh(action) - 0.3) / 0.2, math.log(0.2)
    prior = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
    prior = prior.sum(1) - (1 - action.square()).log().sum(1)
    torch.testing.assert_close(gap, own - prior, rtol=1e-3, atol=1e-3)


def test_the_regularised_optimum_is_the_closed_form() -> None:
    """V = lambda log E_rho exp(Q / lambda), which the policy that is trained on Q reaches."""
    slope, lam = 2.0, 0.5
    learner = make(
        gaussian(0.3, -0.2), prior_std=[0.3, 0.3], initial_temperature=lam, temperature_lr=0.0
    )
    slopes(learner.critic, [slope, slope])
    batch = still(torch.zeros(256, 1), torch.zeros(256, 1), torch.zeros(256))
    for _ in range(400):
        learner.soft_actor_step(batch)
    u = torch.linspace(-4, 4, 20_001, dtype=torch.float64)
    prior = (-0.5 * ((u + 0.2) / 0.3).square()).exp()
    exact = lam * math.log(((prior / prior.sum()) * (slope * torch.tanh(u) / lam).exp()).sum())
    action, gap = learner.drawn(ZERO)
    reached = (slope * action[:, 0] - lam * gap).mean().item()
    assert reached == pytest.approx(exact, abs=0.03)
    before = -2.0 * math.tanh(0.2)  # the value of the prior itself
    assert exact > before + 0.2
    slopes(learner.target, [slope, slope])
    backup = learner._backup(torch.ones(4000), torch.full((4000,), 0.9), ZERO)
    assert backup.mean().item() == pytest.approx(1 + 0.9 * exact, abs=0.05)


def test_the_prior_is_a_fixed_point_where_all_is_worth_the_same() -> None:
    learner = make(gaussian(0.3, 0.4), prior_std=[0.1, 0.5], temperature_lr=0.0, actor_lr=1e-3)
    slopes(learner.critic, [0.0, 0.0])
    batch = still(torch.zeros(512, 1), torch.zeros(512, 1), torch.zeros(512))
    for _ in range(100):
        metrics = learner.soft_actor_step(batch)
    assert metrics["prior_kl"].abs() < 0.02 and "entropy" not in metrics


def test_lambda_is_tuned_to_the_divergence() -> None:
    learner = make(gaussian(0.3, 0.0), prior_std=[0.3, 0.3], kl=0.5, temperature_lr=2e-2)
    slopes(learner.critic, [3.0, 3.0])
    batch = still(torch.zeros(256, 1), torch.zeros(256, 1), torch.zeros(256))
    for _ in range(600):
        metrics = learner.soft_actor_step(batch)
    assert metrics["prior_kl"].item() == pytest.approx(0.5, abs=0.15)


def ppo(**settings: Any) -> Any:
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", SPEC, hidden=[16])
    given = {"horizon": 6, "batch_size": 8, "lam": 0.0, "advantage": "raw", **settings}
    return make_learner("prior.PpoPrior", policy, **given)


def advantages(learner: Any) -> tuple[Tensor, Tensor]:
    """The advantages [24] of a batch and the log ratios [24] by hand."""
    batch = segment(learner, torch.Generator().manual_seed(0))
    table, _ = learner._table(batch, {})
    u = batch["action"].flatten(0, 1)
    obs = {"state": batch["obs/state"].flatten(0, 1)}
    mean = learner.policy(obs)
    own = -0.5 * (u - mean).square() - 0.5 * math.log(2 * math.pi)
    prior = -0.5 * ((u - mean) / 0.5).square() - math.log(0.5) - 0.5 * math.log(2 * math.pi)
    return table["advantage"], (own - prior).sum(1)


def test_ppo_pays_for_the_log_ratio() -> None:
    """The prior is the policy itself, with the deviation 1 held to 0.5."""
    plain, _ = advantages(ppo(prior_weight=0.0))
    paying, ratio = advantages(ppo(prior_weight=0.3))
    torch.testing.assert_close(paying, plain - 0.3 * ratio, rtol=1e-4, atol=1e-5)


def test_the_prior_of_a_run(tmp_path: Path) -> None:
    saved = gaussian(0.3, 0.1)
    checkpoint.save(tmp_path / "checkpoints" / "00000001", saved, 1)
    policy = make_policy("gaussian.Gaussian", LINE, hidden=[32])
    prior = prior_of(PriorConfig(prior=str(tmp_path)), policy, LINE)
    before = each(saved.state_dict(), torch.clone)
    assert all(torch.equal(prior.state_dict()[key], value) for key, value in before.items())
    assert not any(weight.requires_grad for weight in prior.parameters())
    other = make_policy("deterministic.Deterministic", LINE)
    with pytest.raises(ConfigError, match="have to be the same"):
        prior_of(PriorConfig(prior=str(tmp_path)), other, LINE)
