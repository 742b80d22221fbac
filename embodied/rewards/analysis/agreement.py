"""Agreement: cheap measures of a reward against what really happened.

Ranks are averaged where values are equal; intervals are percentiles over resampled episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """How often a score [N] of a positive (label true) is above one of a negative, ties half; NaN
    where there are not both."""
    values, truth = np.asarray(scores, float), np.asarray(labels, bool)
    good, bad = int(truth.sum()), int((~truth).sum())
    if not good or not bad:
        return float("nan")
    return float((ranks(values)[truth].sum() - good * (good + 1) / 2) / (good * bad))


def ranks(values: ArrayLike) -> Numbers:
    """Ranks from 1, equal values sharing their mean rank."""
    _, place, count = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = count.cumsum()
    return (last - (count - 1) / 2)[place]


def spearman(one: ArrayLike, other: ArrayLike) -> float:
    """Rank correlation; NaN where one of them does not vary."""
    x, y = ranks(one), ranks(other)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def within(one: Sequence[ArrayLike], other: Sequence[ArrayLike]) -> Numbers:
    """Rank correlation inside each episode in which both vary."""
    each = np.array([spearman(a, b) for a, b in zip(one, other, strict=True)])
    return each[np.isfinite(each)]


def violations(progress: ArrayLike, slack: float = 0.0) -> float:
    """Share of an episode's steps in which what should only grow falls by more than `slack`."""
    change = np.diff(np.asarray(progress, float))
    return float((change < -slack).mean()) if len(change) else 0.0


def plateau(values: ArrayLike, share: float = 1e-3) -> float:
    """Share of an episode's steps that change by less than `share` of the episode's range."""
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
    """Bootstrap interval of `statistic(episodes)` over `count` episodes drawn with replacement;
    draws on which it is not defined are left out."""
    draws = np.random.default_rng(seed).integers(count, size=(samples, count))
    values = np.array([statistic(draw) for draw in draws])
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    tail = 50 * (1 - confidence)
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
