"""H2O: few recordings of the real system and a simulator that is wrong (Niu et al., 2022).

SAC on batches of real transitions (demonstrations; column `real`) and of simulated ones.
Classifiers of (s, a) and of (s, a, s') give the ratio of the dynamics,
w = p_real(s'|s, a) / p_sim(s'|s, a):

    d_sa  = log odds of real against simulated of (s, a);  d_sa + log w: of (s, a, s')
    L_Q   = E_real (Q - y)^2 + E_sim clip(w) (Q - y)^2
            + c (log sum_sim omega exp Q - E_real Q),   omega = u / sum u,   u = E_noise -log w

The last term lowers values where the simulator errs and raises those of real transitions; u
averages over disturbed next states and is held in [1e-6, 10].

Differences from the published code: the classifier of (s, a, s') sees the change s' - s in units of
its deviation in the real transitions, which is also the size of the disturbance (theirs: s', and
the deviation in a buffer that is padded with zeros); both kinds of transitions count equally in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from embodied.core.bounds import Bound, Count, NonNegative, Positive, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.env import REAL
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy import sac
from embodied.nn.networks import mlp
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.nn.optim import Adam

MOST_LOG_ODDS = 4.0  # of each classifier, by a tanh
MOST_GAP = 1000.0  # of the last term before its weight


@dataclass(frozen=True)
class Config(sac.Config):
    """Settings of H2O: those of SAC, of the classifiers and of the gap's term."""

    entropy_in_backup: bool = False  # whether the critics' target has the entropy bonus
    classifier_hidden: tuple[Units, ...] = (256, 256)  # units of the classifiers' hidden layers
    classifier_lr: PositiveFraction = 3e-4  # Adam's learning rate of the classifiers
    classifier_noise: NonNegative = 0.1  # std of the noise on their standardised inputs
    least_weight: Annotated[float, Bound(above=0.0, high=1.0)] = 1e-5  # of a simulated transition
    gap_weight: NonNegative = 0.01  # c
    gap_samples: Count = 10  # disturbed next states
    gap_spread: Positive = 1.0  # std of the disturbance, in deviations of the real changes


class H2o(sac.Sac):
    """`update` as in SAC, with a step of the classifiers before each step of the critics."""

    extra_columns: tuple[str, ...] = (REAL,)

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        if config.n_step > 1:
            raise ConfigError("learner=h2o compares single steps: learner.n_step=1")
        super().__init__(config, policy, spec)
        encoder = self.critic.encoder
        hidden = config.classifier_hidden
        encoder.only_vectors()
        pair = encoder.size + self.policy.size
        self.change = MeanStdNormalizer(encoder.size)
        self.pairs = mlp(pair, hidden, 1)
        self.triples = mlp(pair + encoder.size, hidden, 1)
        weights = [*self.pairs.parameters(), *self.triples.parameters()]
        self.optims["classifiers"] = Adam(weights, config.classifier_lr)

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        obs, following = under(transitions, "obs"), under(transitions, "next_obs")
        self.change.fit(self.critic.encoder.flat(following) - self.critic.encoder.flat(obs))

    def critic_step(self, batch: Tensors, tau: float = 0.0) -> dict[str, Tensor]:
        loss = self.classifier_loss(batch)
        self.descend("classifiers", loss)
        return {**super().critic_step(batch, tau), "classifier_loss": loss.detach()}

    def classifier_loss(self, batch: Tensors) -> Tensor:
        """The cross entropies of both classifiers, real and simulated transitions equally."""
        noise = self.config.classifier_noise
        pair, change = self._inputs(batch)
        pair = pair + noise * torch.randn_like(pair)
        change = change + noise * torch.randn_like(change)
        first = log_odds(self.pairs, pair)
        second = first.detach() + log_odds(self.triples, torch.cat([pair, change], 1))
        return even_cross_entropy(first, batch[REAL]) + even_cross_entropy(second, batch[REAL])

    @torch.no_grad()
    def log_ratio(self, batch: Tensors, spread: float = 0.0) -> Tensor:
        """log p_real(s'|s, a) - log p_sim(s'|s, a), [N], of next states disturbed by `spread`."""
        pair, change = self._inputs(batch)
        if spread:
            change = change + spread * torch.randn_like(change)
        return log_odds(self.triples, torch.cat([pair, change], 1))

    def _inputs(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Standardised states with actions, and standardised changes of the states."""
        encoder = self.critic.encoder
        obs, following = (encoder.flat(under(batch, kind)) for kind in ("obs", "next_obs"))
        pair = torch.cat([encoder.norm(obs), batch["action"]], 1)
        return pair, self.change(following - obs)

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        ratio = self.log_ratio(batch).exp().clamp(self.config.least_weight, 1.0)
        weight = torch.where(batch[REAL], 1.0, ratio)
        return super()._critic_loss({**batch, "weight": weight * batch.get("weight", 1.0)})

    def critic_terms(self, batch: Tensors, q: Tensor) -> Tensor | float:
        """The gap's term, summed over the critics."""
        config = self.config
        if not config.gap_weight:
            return 0.0
        ratios = [self.log_ratio(batch, config.gap_spread) for _ in range(config.gap_samples)]
        gap = (-torch.stack(ratios).mean(0)).clamp(1e-6, 10.0)
        return config.gap_weight * gap_term(q, gap, batch[REAL]).sum()


def log_odds(net: nn.Module, x: Tensor) -> Tensor:
    """The bounded output [N] of a classifier."""
    return MOST_LOG_ODDS * torch.tanh(net(x).squeeze(1))


def even_cross_entropy(logit: Tensor, real: Tensor) -> Tensor:
    """The mean of the mean cross entropies of real and of simulated transitions; both [N]."""
    share = real.float()
    of_real = (softplus(-logit) * share).sum() / share.sum().clamp(min=1)
    of_simulated = (softplus(logit) * (1 - share)).sum() / (1 - share).sum().clamp(min=1)
    return (of_real + of_simulated) / 2


def gap_term(q: Tensor, gap: Tensor, real: Tensor) -> Tensor:
    """log sum_sim omega exp Q - E_real Q, [E], at most MOST_GAP; `q` [E, N], `gap` [N] > 0."""
    share = torch.where(real, 0.0, gap)
    omega = share / share.sum().clamp(min=1e-6)
    simulated = torch.where(real, -1e9, q + omega.clamp(min=1e-30).log()).logsumexp(1)
    of_real = (q * real).sum(1) / real.sum().clamp(min=1)
    return (simulated - of_real).clamp(-MOST_GAP, MOST_GAP)
