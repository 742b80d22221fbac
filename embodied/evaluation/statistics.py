"""Confidence intervals for success rates and for scores over a few runs.

Wilson (1927): (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). Interquartile mean with
stratified bootstrap: Agarwal et al., "Deep RL at the edge of the statistical precipice" (2021).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval (low, high) of a success rate; (0, 1) without trials."""
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, square = successes / trials, z * z / trials
    center = (rate + square / 2) / (1 + square)
    half = z * np.sqrt(rate * (1 - rate) / trials + square / (4 * trials)) / (1 + square)
    low, high = float(center - half), float(center + half)
    # Rounding must not exclude 0 or 1 if all trials agree.
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)


def rate(successes: int, trials: int) -> str:
    """ "73% [66%, 79%]": a success rate and its 95% Wilson interval."""
    low, high = wilson(successes, trials)
    return f"{_percent(successes / max(trials, 1))} [{_percent(low)}, {_percent(high)}]"


def _percent(share: float) -> str:
    """Rounded to a percent, near 0 and 1 to a tenth: 100% should mean all."""
    near = 0 < share <= 0.005 or 0.995 <= share < 1
    return f"{share:.1%}" if near else f"{share:.0%}"


def iqm(scores: ArrayLike) -> float:
    """The interquartile mean: the mean without the lowest and highest quarter (rounded down)."""
    return float(_middle(np.asarray(scores, dtype=np.float64).reshape(1, -1))[0])


def bootstrap_interval(
    scores: ArrayLike,
    statistic: Statistic | None = None,
    confidence: float = 0.95,
    samples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of `statistic` over runs. `scores` is [runs] or [runs,
    tasks]; runs are resampled with replacement within each task. The statistic maps [samples, runs
    * tasks] to [samples]; None: the interquartile mean."""
    table = np.asarray(scores, dtype=np.float64)
    if not table.size:
        raise ValueError("an interval needs at least one score")
    table = table.reshape(len(table), -1)
    runs, tasks = table.shape
    picks = np.random.default_rng(seed).integers(runs, size=(samples, runs, tasks))
    drawn = table[picks, np.arange(tasks)].reshape(samples, -1)
    tail = 50 * (1 - confidence)
    low, high = np.percentile((statistic or _middle)(drawn), [tail, 100 - tail])
    return float(low), float(high)


def probability_of_improvement(
    better: ArrayLike, baseline: ArrayLike, samples: int = 2_000, seed: int = 0
) -> tuple[float, float, float]:
    """P(a run of `better` scores higher than one of `baseline`), and its 95% bootstrap interval.
    The mean over all pairs of runs, ties count one half (Agarwal et al., 2021, section 4.3); runs
    of each side are resampled on their own."""
    one, other = np.asarray(better, np.float64), np.asarray(baseline, np.float64)
    if not one.size or not other.size:
        raise ValueError("a probability needs at least one score on each side")
    wins = (one[:, None] > other) + 0.5 * (one[:, None] == other)
    random = np.random.default_rng(seed)
    rows = random.integers(len(one), size=(samples, len(one), 1))
    columns = random.integers(len(other), size=(samples, 1, len(other)))
    drawn = wins[rows, columns].mean((1, 2))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(wins.mean()), float(low), float(high)


def performance_profile(scores: ArrayLike, thresholds: ArrayLike) -> NDArray[np.float64]:
    """The share of runs [T] with a score above each of T thresholds (Agarwal et al., 2021)."""
    runs = np.asarray(scores, np.float64).reshape(-1, 1)
    if not runs.size:
        raise ValueError("a profile needs at least one score")
    return (runs > np.asarray(thresholds, np.float64)).mean(0)


def _middle(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The interquartile mean of each row [samples, n] -> [samples]."""
    count = rows.shape[1]
    if not count:
        raise ValueError("a mean needs at least one score")
    cut = count // 4
    return np.sort(rows, axis=1)[:, cut : count - cut].mean(axis=1)
