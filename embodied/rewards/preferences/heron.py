"""HERON: a reward learned from a ranking of factors by importance, instead of weights.

    level l decides between transitions i, j iff |z_l(i) - z_l(j)| > margin_l std(z_l), larger wins;
    a tie at every level is dropped;   loss = E softplus(-(r(i) - r(j))) for i preferred to j

Bukharin et al., "Deep reinforcement learning with hierarchical reward modeling" (2023), with the
Bradley-Terry model as the reward itself. Preferences are computed on the agent's transitions, and
the model is fitted continually. Such preferences are not transitive near the margins, so that no
model agrees with all of them: see `accuracy`, measured before learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Count, Number, PositiveFraction, Units
from embodied.core.build import ConfigError, Node
from embodied.core.device import forked
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import mlp
from embodied.nn.normalizers import RunningMeanStd
from embodied.nn.optim import Adam, gradient_step
from embodied.rewards.handcrafted.factors import Factor
from embodied.rewards.intrinsic.features import ObservationFeatures

TOP = 0.99  # quantile of the scores that gets a cost of 0


@dataclass(frozen=True)
class HeronConfig:
    """Settings of HERON. A `margin` is in standard deviations of its factor: 0 for a binary factor
    such as success. Both levels of the reward have the standard deviation `weight`."""

    factors: tuple[Node, ...]  # the most important first; with `weight` -1 if less is better
    leaves: tuple[str, ...] | None = None  # observations that are scored; null: all
    hidden: tuple[Units, ...] = (256, 256)  # units of the hidden layers
    lr: PositiveFraction = 1e-3  # Adam's learning rate
    rows: Count = 256  # transitions of a batch that are compared
    rivals: Count = 16  # other transitions that each is compared with
    rounds: Count = 4  # gradient steps per fit
    every: Count = 10  # updates of the learner between fits
    level: Literal["cost", "centred"] = "cost"  # at most 0, so delay never pays; or of mean 0
    weight: Number = 1.0  # standard deviation of the learned reward
    env_weight: Number = 0.0  # weight of the environment's reward


class Heron(Remembered, SummedReward):
    """Applied when transitions are sampled, to their next observations."""

    frozen = False
    remembered = (
        *("net", "adam", "generator", "factor_moments"),
        *("features", "middle", "count", "metrics"),
    )

    def __init__(self, config: HeronConfig, spec: Spec, device: torch.device, seed: int) -> None:
        if not config.factors:
            raise ConfigError("reward.factors needs at least one factor")
        self.config = config
        plain = [{k: v for k, v in node.items() if k != "margin"} for node in config.factors]
        self.factors = [Factor(node, spec) for node in plain]
        self.margins = torch.tensor([float(node.get("margin", 1.0)) for node in config.factors])
        self.features = ObservationFeatures(spec.obs, config.leaves, device)
        with forked(seed):
            self.net = mlp(self.features.size, config.hidden, 1).to(device)
        self.adam = Adam(self.net.parameters(), lr=config.lr, local=True)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.factor_moments = RunningMeanStd(len(self.factors), device)
        self.middle = torch.zeros(3, device=device)  # mean, deviation, top of the scores
        self.middle[1] = 1.0
        self.count = 0
        self.metrics: dict[str, Tensor] = {}

    @torch.no_grad()
    def components(self, transitions: Tensors) -> Tensors:
        mean, std, top = self.middle
        zero = mean if self.config.level == "centred" else top
        learned = (self.score(transitions) - zero) / std
        if self.config.level == "cost":
            learned = learned.clamp(max=0)
        env = self.config.env_weight * transitions["reward"]
        return {"env": env, "preferred": self.config.weight * learned}

    def score(self, transitions: Tensors) -> Tensor:
        return self.net(self.features(transitions, "next_obs"))[:, 0]

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        self.count += 1
        if (self.count - 1) % self.config.every == 0:
            self.metrics = self._fit(transitions)
        return self.metrics

    def _fit(self, transitions: Tensors) -> dict[str, Tensor]:
        n, device = len(transitions["reward"]), transitions["reward"].device
        drawn = torch.randperm(n, generator=self.generator, device=device)[: self.config.rows]
        transitions = {k: v[drawn] for k, v in transitions.items()}
        values = torch.stack([factor(transitions) for factor in self.factors], 1)
        self.factor_moments.update(values)
        self.features.update(transitions, "next_obs")
        first, second, wins, decided = self._compare(values)
        with torch.no_grad():
            gap = (self.score(transitions)[first] - self.score(transitions)[second]) * wins
            right = ((gap > 0) & (wins != 0)).float().sum() / (wins != 0).sum().clamp(min=1)
        loss = torch.zeros(())
        for _ in range(self.config.rounds):
            loss = preference_loss(self.score(transitions), first, second, wins)
            gradient_step(self.adam, loss)
        self._rescale(transitions)
        shares = {
            f"decided_{level}": (decided == level).float().mean()
            for level in range(len(self.factors))
        }
        return {"loss": loss.detach(), "accuracy": right, **shares}

    def _compare(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compares every transition with some others: (index, rival, winner, deciding level), [P]
        each."""
        n = len(values)
        first = torch.arange(n, device=values.device).repeat(self.config.rivals)
        ahead = torch.randint(
            1, max(n, 2), (len(first),), generator=self.generator, device=values.device
        )
        second = (first + ahead) % n
        margins = self.margins.to(values.device) * self.factor_moments.std
        wins, decided = preferences(values[first], values[second], margins)
        return first, second, wins, decided

    @torch.no_grad()
    def _rescale(self, transitions: Tensors) -> None:
        """Update the reward's zero and scale: the scale of a preference model only grows."""
        scores = self.score(transitions)
        std = scores.std(correction=0).clamp(min=1e-3)
        self.middle.copy_(torch.stack([scores.mean(), std, scores.quantile(TOP)]))


def preferences(one: Tensor, other: Tensor, margins: Tensor) -> tuple[Tensor, Tensor]:
    """(1 if `one` wins, -1 if `other` does, 0 for a tie; the deciding level, -1 for a tie) [P] of
    factors [P, K] in order of importance, and margins [K]."""
    gap = one - other
    decides = gap.abs() > margins
    level = decides.float().argmax(1)
    none = ~decides.any(1)
    wins = gap.gather(1, level[:, None])[:, 0].sign()
    return torch.where(none, 0.0, wins), torch.where(none, -1, level)


def preference_loss(scores: Tensor, first: Tensor, second: Tensor, wins: Tensor) -> Tensor:
    """Bradley-Terry loss: mean softplus(-(r_i - r_j)) over the pairs that are no ties."""
    gap = (scores[first] - scores[second]) * wins
    known = (wins != 0).float()
    return (functional.softplus(-gap) * known).sum() / known.sum().clamp(min=1)
