"""Demonstration-regularised RL: SAC and PPO near a cloned policy (Tiapkin et al., 2024).

    max_pi E sum_t r_t - lambda KL(pi(.|s_t) || rho(.|s_t))
    pi(a|s) ~ rho(a|s) exp(Q(s, a) / lambda),   V(s) = lambda log E_{a ~ rho} exp(Q(s, a) / lambda)

The prior rho is a behaviour cloning of demonstrations. The paper is on tables; the deep forms are
ours. `SacPrior` is SAC whose entropy is the negative KL divergence, in the critics' target and in
the policy's loss; lambda is the temperature, tuned to hold the divergence at `kl`. `PpoPrior`
subtracts lambda log(pi / rho) from the rewards.

A cloned Gaussian is narrow on the demonstrations and arbitrary elsewhere, where its log-density
would outweigh every reward: its deviation is held in `prior_std`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core.bounds import Fraction, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.checkpoint import load_policy
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, under
from embodied.learners.learner import RunPlan
from embodied.learners.off_policy import sac
from embodied.learners.on_policy import ppo
from embodied.learners.on_policy.ppo_cloning import remaining
from embodied.learners.on_policy.ppo_parts import StochasticPolicy
from embodied.policies.diagonal_gaussian import DiagonalGaussian


@dataclass(frozen=True)
class PriorConfig:
    prior: str | None = None  # run whose policy is the prior; null: the policy itself (init=RUN)
    prior_std: tuple[Positive, Positive] = (0.1, 0.5)  # bounds of its std, before squashing


def prior_of(config: PriorConfig, policy: Policy, spec: Spec) -> Policy:
    """The frozen prior: the policy of the run, which may observe less, or a copy of `policy` as it
    begins. ConfigError for one of another kind than `policy`."""
    found = (
        copy.deepcopy(policy)
        if config.prior is None
        else load_policy(config.prior, spec, part=True)
    )
    if type(found) is not type(policy) or found.chunk != policy.chunk:
        raise ConfigError(
            f"learner.prior is a {type(found).__name__} of chunk={found.chunk}, and the policy a "
            f"{type(policy).__name__} of chunk={policy.chunk}: they have to be the same"
        )
    low, high = config.prior_std
    if low > high:
        raise ConfigError(f"learner.prior_std={[low, high]} should be its least and its largest")
    return found.eval().requires_grad_(False)


@dataclass(frozen=True)
class SacConfig(PriorConfig, sac.Config):
    """Settings of SAC with a prior. `initial_temperature` is lambda, in units of the return."""

    kl: Positive = 1.0  # divergence that lambda is tuned to, nats per action element


class SacPrior(sac.Sac):
    """`update` as in SAC."""

    given = ("prior_policy",)

    def __init__(self, config: SacConfig, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.prior_policy = prior_of(config, policy, spec)
        self.entropy = -config.kl * self.policy.size

    def drawn(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Actions [N, size] of the policy, and log pi - log rho of them, [N]. Both densities are
        those before squashing, whose Jacobians cancel: no action is clipped."""
        mean, log_std = self.policy(obs)
        noise = torch.randn_like(mean)
        u = mean + log_std.exp() * noise
        with torch.no_grad():
            prior_mean, prior_log_std = self.prior_policy(obs)
        prior_std = prior_log_std.exp().clamp(*self.config.prior_std)
        z = (u - prior_mean) / prior_std
        gap = (z.square() - noise.square()) / 2 + prior_std.log() - log_std
        return self.policy.squash(u), gap.sum(1)

    def soft_actor_step(
        self, batch: Tensors, fixed: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor]:
        metrics = super().soft_actor_step(batch, fixed)
        metrics["prior_kl"] = -metrics.pop("entropy")
        return metrics


@dataclass(frozen=True)
class PpoConfig(PriorConfig, ppo.Config):
    prior_weight: NonNegative = 0.1  # lambda, in units of the reward
    prior_decay: Fraction = 0.0  # share of the run over which lambda decays to 0; 0: no decay


class PpoPrior(ppo.Ppo):
    """`update` as in PPO."""

    takes_memory = False

    def __init__(self, config: PpoConfig, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)
        if config.prior_decay and not run.decisions:
            raise ConfigError(f"prior_decay={config.prior_decay:g} needs the length of the run")
        self.prior_policy = prior_of(config, policy, spec)
        if isinstance(self.prior_policy, DiagonalGaussian):
            low, high = config.prior_std
            self.prior_policy.log_std.data.exp_().clamp_(low, high).log_()
        self.estimates = None  # values are not in units of the environment's rewards

    @torch.no_grad()
    def _table(self, batch: Tensors, carry: Tensors) -> tuple[Tensors, dict[str, Tensor]]:
        config = self.config
        flat = each(batch, lambda leaf: leaf.flatten(0, 1))
        obs, action = under(flat, "obs"), flat["action"]
        gap = self._evaluate_actions(flat)[0] - log_prob(self.prior_policy, obs, action)
        gap = gap.view_as(batch["reward"])
        weight = config.prior_weight * remaining(self.done, config.prior_decay, self.total)
        table, metrics = super()._table({**batch, "reward": batch["reward"] - weight * gap}, carry)
        share = batch["valid"] / batch["valid"].sum().clamp(min=1)
        return table, metrics | {"prior_kl": (gap * share).sum()}


def log_prob(policy: nn.Module, obs: Tensors, action: Tensor) -> Tensor:
    """Log-probabilities [N] of stored actions."""
    assert isinstance(policy, StochasticPolicy)
    return policy.evaluate_actions(obs, action)[0]
