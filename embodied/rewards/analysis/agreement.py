"""Agreement of a learned reward with the true reward or progress of whole episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodied.nn.statistics import spearman

Numbers = NDArray[np.float64]


def within(one: Sequence[ArrayLike], other: Sequence[ArrayLike]) -> Numbers:
    """Spearman's correlation within each episode in which both vary."""
    each = np.array([spearman(a, b) for a, b in zip(one, other, strict=True)])
    return each[np.isfinite(each)]


def violations(progress: ArrayLike, slack: float = 0.0) -> float:
    """Fraction of steps in which a progress estimate decreases by more than `slack`."""
    change = np.diff(np.asarray(progress, float))
    return float((change < -slack).mean()) if len(change) else 0.0


def plateau(values: ArrayLike, share: float = 1e-3) -> float:
    """Fraction of steps that change by at most `share` of the episode's range of values."""
    series = np.asarray(values, float)
    if len(series) < 2:
        return 0.0
    return float((np.abs(np.diff(series)) <= share * np.ptp(series)).mean())


def interval(
    statistic: Callable[[NDArray[np.int64]], float],
    count: int,
    samples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap confidence interval (percentiles) of `statistic(episodes)`, with `count` episodes
    resampled with replacement; samples for which it is NaN are skipped."""
    draws = np.random.default_rng(seed).integers(count, size=(samples, count))
    values = np.array([statistic(draw) for draw in draws])
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    tail = 50 * (1 - confidence)
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
