"""Trajectory weighting of offline data: better trajectories are sampled more often (AW, RW).

Hong, Agrawal, Tachet des Combes and Laroche, "Harnessing mixed offline reinforcement learning
datasets via trajectory weighting" (2023). The learner does not change. Trajectory i of return G_i
has the weight

    w_i = exp(u_i / alpha),   u_i min-max normalised over the dataset

with u = G (`Return`), or u = G - b(s_0) with a linear baseline b, where some initial states are
easier (`Advantage`). Every transition has the weight of its trajectory. If all returns are 0 or 1,
this imitates the successful episodes, and what could be joined of the others is lost. In stochastic
environments it favours lucky trajectories. The gain grows with `positive_variance`.

`Top` keeps only the best trajectories or steps, ranked by the discounted return: of two successes
with sparse rewards the sooner one is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from embodied.buffers.pending import returns_to_go
from embodied.core import tensors as tt
from embodied.core.bounds import Fraction, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import return_ends
from embodied.nn.statistics import ranks


class Weights(Protocol):
    """Weights (float64, not negative) of E episodes, [E], or of all of their N steps, [N]."""

    def __call__(self, episodes: Episodes) -> Tensor: ...


class Weighted:
    """A `Source` of N fixed transitions, sampled with replacement in proportion to `weight` [N].
    Sampling is a binary search in the cumulative sum of the weights, which is computed once."""

    def __init__(self, rows: Tensors, weight: Tensor, device: torch.device | str = "cpu") -> None:
        self.rows = {key: value.to(device).contiguous() for key, value in rows.items()}
        self.device, self.length = torch.device(device), tt.length(rows)
        if len(weight) != self.length or not bool((weight >= 0).all()) or not weight.sum() > 0:
            raise ValueError("weights should be one per transition, non-negative and not all zero")
        # float64: in float32 a sum over millions of transitions loses small weights.
        self.sums = weight.double().cumsum(0).to(device)
        squares = weight.double().square().sum()
        self.effective = float(self.sums[-1].cpu().square() / squares)

    def __len__(self) -> int:
        return self.length

    def sample(self, n: int) -> Tensors:
        """`n` transitions by torch's default generator."""
        lot = torch.rand(n, dtype=torch.float64, device=self.device) * self.sums[-1]
        index = torch.searchsorted(self.sums, lot, right=True).clamp(max=self.length - 1)
        return load(tt.take(self.rows, index))


@dataclass(frozen=True)
class Config:
    """Settings of weights by return. Clipping at `quantile`, or `ranks`, keeps a single outlier
    from getting all the weight."""

    alpha: Positive = 0.1  # temperature; smaller is greedier
    quantile: PositiveFraction = 1.0  # returns are clipped at it (1: no clipping, as published)
    ranks: bool = False  # ranks in the place of returns, ties at their mean rank


class Return(Weights):
    """w_i = exp(G_i / alpha), G min-max normalised ("RW")."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, episodes: Episodes) -> Tensor:
        score = self.score(episodes)
        if self.config.ranks:
            score = torch.from_numpy(ranks(score))
        score = score.clamp(max=float(score.quantile(self.config.quantile)))
        spread = score.max() - score.min()
        if spread == 0:
            return torch.ones_like(score)
        return ((score - score.max()) / spread / self.config.alpha).exp()

    def score(self, episodes: Episodes) -> Tensor:
        return returns(episodes)


class Advantage(Return):
    """w_i = exp((G_i - b(s_0)) / alpha), min-max normalised, b fitted by least squares ("AW")."""

    def score(self, episodes: Episodes) -> Tensor:
        whole = returns(episodes)
        first = tt.take(tt.under(episodes.steps, "obs"), episodes.start)
        vectors = [v.flatten(1).double() for v in first.values() if v.is_floating_point()]
        if not vectors:
            raise ConfigError(
                "weighting=advantage needs a float observation of the initial state: "
                "weighting=return"
            )
        start = torch.cat(vectors, 1)
        start = (start - start.mean(0)) / start.std(0).clamp(min=1e-6)
        start = torch.cat([torch.ones(len(start), 1, dtype=torch.float64), start], 1)
        # gelsd: observation elements may be constant or linearly dependent.
        fitted = torch.linalg.lstsq(start, whole.unsqueeze(1), driver="gelsd").solution
        return whole - (start @ fitted).squeeze(1)


@dataclass(frozen=True)
class TopConfig:
    share: PositiveFraction = 0.1  # fraction of the trajectories or steps kept, at least one
    of: Literal["episodes", "steps"] = "episodes"  # "steps": by what follows each (play data)
    gamma: Fraction | None = None  # discount of the returns per step (null: the learner's)


class Top(Weights):
    """Weight 1 for the best trajectories, or steps, and 0 for the others. `gamma` is the learner's
    discount. Where a time limit cuts an episode, the return-to-go of its steps is completed as in
    `embodied.buffers.pending`."""

    def __init__(self, config: TopConfig, gamma: float) -> None:
        self.config = config
        self.gamma = gamma if config.gamma is None else config.gamma

    def __call__(self, episodes: Episodes) -> Tensor:
        if self.config.of == "episodes":
            score = returns(episodes, self.gamma)
        else:
            discount = self.gamma * (~return_ends(episodes)).double()
            reward = episodes.steps["reward"].double()
            score = returns_to_go(reward, discount, episodes.length)
        kept = score.topk(max(1, round(self.config.share * len(score)))).indices
        return torch.zeros_like(score).index_fill(0, kept, 1.0)


def positive_variance(episodes: Episodes) -> float:
    """The positive-sided variance E max(u - E u, 0)^2 of the returns u, min-max normalised: how
    much better than the mean the good episodes are."""
    whole = returns(episodes)
    normalized = (whole - whole.min()) / (whole.max() - whole.min()).clamp(min=1e-12)
    return float((normalized - normalized.mean()).clamp(min=0).square().mean())


def returns(episodes: Episodes, gamma: float = 1.0) -> Tensor:
    """Sum of the rewards of every episode, discounted by `gamma` per step, [E] (float64)."""
    episode = torch.repeat_interleave(torch.arange(len(episodes)), episodes.length)
    step = torch.arange(len(episode)) - episodes.start[episode]
    zeros = torch.zeros(len(episodes), dtype=torch.float64)
    return zeros.index_add(0, episode, episodes.steps["reward"].double() * gamma ** step.double())
