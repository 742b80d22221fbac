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

SAFE = 0.9
"""A policy below this share of the behaviour policy's value is a bad one to try."""


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


def portfolio(
    estimates: Sequence[float], true: Sequence[float], behaviour: float, k: int
) -> Portfolio:
    """The choice of k policies, 2 or more, by their `estimates`. The behaviour policy, which is
    estimated by its value, may be one of them. ValueError for other k."""
    if not 2 <= k <= len(true) + 1:
        raise ValueError(f"k={k} is not in 2..{len(true) + 1}")
    pairs = sorted(
        zip([*estimates, behaviour], [*true, behaviour], strict=True),
        key=lambda pair: -pair[0],
    )
    chosen = [value for _, value in pairs[:k]]
    spread = max(*true, behaviour) - min(*true, behaviour)
    least = behaviour - (1 - SAFE) * abs(behaviour)
    return Portfolio(
        best=max(chosen),
        worst=min(chosen),
        mean=fmean(chosen),
        std=pstdev(chosen),
        gain=max(chosen) - behaviour,
        regret=(max(*true, behaviour) - max(chosen)) / spread if spread else 0.0,
        unsafe=sum(value < least for value in chosen) / k,
    )
