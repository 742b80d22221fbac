"""How good an estimator's choice of k policies is, where their true values are known.

SharpeRatio@k (Kiyohara et al., 2024): of the k policies with the highest estimates, the behaviour
policy among them,

    SR@k = (max_i J_i - J_b) / std(J_i)

is the gain over the behaviour policy of value J_b that a trial of all k finds, over the spread that
it has to go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Annotated

from embodied.core.bounds import Bound, CountOrZero
from embodied.core.build import ConfigError

SAFE = 0.9
"""A policy below this share of the behaviour policy's value is a bad one to try."""


@dataclass(frozen=True)
class Config:
    """Settings of the choice of policies to try."""

    k: Annotated[int, Bound(2)] = 2  # policies that are chosen
    truth: CountOrZero = 0  # episodes in which each policy is played, for its true value (0: none)


@dataclass(frozen=True)
class Portfolio:
    """True values of the chosen k policies; `regret` of the best of them, of the range of all;
    `unsafe`: the share that is worth less than 90% of the behaviour policy."""

    best: float
    worst: float
    mean: float
    std: float
    gain: float
    regret: float
    unsafe: float

    @property
    def sharpe(self) -> float:
        """0 where both terms are 0, infinite where only the spread is."""
        if self.std:
            return self.gain / self.std
        return 0.0 if not self.gain else float("inf") * self.gain


def choice(estimates: Sequence[float], behaviour: float, k: int) -> list[int]:
    """The numbers of the k policies with the highest estimates, the best first. The last number is
    the behaviour policy, estimated by its value. ConfigError for more than there are."""
    values = [*estimates, behaviour]
    if k > len(values):
        raise ConfigError(f"k={k}: there are {len(values)} policies, the behaviour policy included")
    return sorted(range(len(values)), key=lambda i: -values[i])[:k]


def portfolio(
    estimates: Sequence[float], true: Sequence[float], behaviour: float, k: int
) -> Portfolio:
    """The choice of k policies by their `estimates`, of the `true` values."""
    values = [*true, behaviour]
    chosen = [values[i] for i in choice(estimates, behaviour, k)]
    spread = max(values) - min(values)
    least = behaviour - (1 - SAFE) * abs(behaviour)
    return Portfolio(
        best=max(chosen),
        worst=min(chosen),
        mean=fmean(chosen),
        std=pstdev(chosen),
        gain=max(chosen) - behaviour,
        regret=(max(values) - max(chosen)) / spread if spread else 0.0,
        unsafe=sum(value < least for value in chosen) / k,
    )
