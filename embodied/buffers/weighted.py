"""Weighted: sample the rows of better trajectories more often; the learner does not change.

Hong, Agrawal, Tachet des Combes and Laroche, "Harnessing mixed offline reinforcement learning
datasets via trajectory weighting" (2023). Trajectory i, of return G_i, weighs

    w_i = exp(u_i / alpha),   u_i min-max normalised over the data

with u = G (`Return`) or u = G - b(s_0), b linear, where some starts are easier (`Advantage`); `Top`
keeps the best only. Each row weighs what its trajectory does. Where all returns are 0 or 1 this is
cloning the successes, and where luck decides it favours the lucky.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes


class Weights(Protocol):
    """Weights [E] (float64, not negative) of E episodes."""

    def __call__(self, episodes: Episodes) -> Tensor: ...


class Weighted:
    """A fixed set of rows, drawn with replacement in proportion to `weight` [N]: a `Source`.

    A draw costs a binary search in sums made once, whatever N is.
    """

    def __init__(self, rows: Tensors, weight: Tensor, device: torch.device | str = "cpu") -> None:
        self.rows = {key: value.to(device).contiguous() for key, value in rows.items()}
        self.device, self.length = torch.device(device), tt.length(rows)
        if len(weight) != self.length or not bool((weight >= 0).all()) or not weight.sum() > 0:
            raise ValueError("weights should be one a row, none negative and not all zero")
        # float64: in float32 a sum over millions of rows loses the small ones.
        self.sums = weight.double().cumsum(0).to(device)
        squares = weight.double().square().sum()
        self.effective = float(self.sums[-1].cpu().square() / squares)

    def __len__(self) -> int:
        return self.length

    def sample(self, n: int) -> Tensors:
        """`n` rows by torch's default generator."""
        lot = torch.rand(n, dtype=torch.float64, device=self.device) * self.sums[-1]
        index = torch.searchsorted(self.sums, lot, right=True).clamp(max=self.length - 1)
        return tt.take(self.rows, index)


@dataclass(frozen=True)
class Config:
    """`alpha`: temperature; smaller is greedier. `quantile`: returns above this quantile count as
    it, so that a single outlier does not take all the weight (1: as published)."""

    alpha: float = 0.1
    quantile: float = 1.0


class Return:
    """w_i = exp(G_i / alpha), G min-max normalised ("RW")."""

    def __init__(self, config: Config) -> None:
        if config.alpha <= 0 or not 0 < config.quantile <= 1:
            raise ConfigError("weighting: alpha should be above 0 and quantile in (0, 1]")
        self.config = config

    def __call__(self, episodes: Episodes) -> Tensor:
        score = self.score(episodes)
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
                "weighting=advantage needs numbers to see the start: weighting=return"
            )
        start = torch.cat(vectors, 1)
        start = (start - start.mean(0)) / start.std(0).clamp(min=1e-6)
        start = torch.cat([torch.ones(len(start), 1, dtype=torch.float64), start], 1)
        # gelsd: some of the start's elements may be constant, or sums of others.
        fitted = torch.linalg.lstsq(start, whole.unsqueeze(1), driver="gelsd").solution
        return whole - (start @ fitted).squeeze(1)


@dataclass(frozen=True)
class TopConfig:
    """`share` of the trajectories, the best ones, that are kept (at least one)."""

    share: float = 0.1


class Top:
    """1 for the best trajectories and 0 for the others."""

    def __init__(self, config: TopConfig) -> None:
        if not 0 < config.share <= 1:
            raise ConfigError(f"weighting: share={config.share} should be in (0, 1]")
        self.share = config.share

    def __call__(self, episodes: Episodes) -> Tensor:
        whole = returns(episodes)
        kept = whole.topk(max(1, round(self.share * len(whole)))).indices
        return torch.zeros_like(whole).index_fill(0, kept, 1.0)


def returns(episodes: Episodes) -> Tensor:
    """Undiscounted sum of rewards of every episode, [E] (float64)."""
    episode = torch.repeat_interleave(torch.arange(len(episodes)), episodes.length)
    zeros = torch.zeros(len(episodes), dtype=torch.float64)
    return zeros.index_add(0, episode, episodes.steps["reward"].double())
