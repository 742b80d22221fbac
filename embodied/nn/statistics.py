"""Rank statistics: ranks with ties, Spearman's correlation, area under the ROC curve."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


def ranks(values: ArrayLike) -> Numbers:
    """Ranks [N] from 1; equal values share their mean rank."""
    _, place, count = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = count.cumsum()
    return (last - (count - 1) / 2)[place]


def spearman(one: ArrayLike, other: ArrayLike, undefined: float = float("nan")) -> float:
    """Spearman's rank correlation of two samples [N]; `undefined` if one of them is constant."""
    x, y = ranks(one), ranks(other)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return undefined
    return float(np.corrcoef(x, y)[0, 1])


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve of `scores` [N] for boolean `labels` [N]: the probability that a
    positive scores higher than a negative, ties counting half. NaN without positives or negatives.
    """
    values = np.asarray(scores, float)
    truth = np.asarray(labels, bool)
    good, bad = int(truth.sum()), int((~truth).sum())
    if not good or not bad:
        return float("nan")
    return float((ranks(values)[truth].sum() - good * (good + 1) / 2) / (good * bad))


def auc_of_samples(positive: ArrayLike, negative: ArrayLike) -> float:
    """`auc` of two samples: P(positive > negative) + P(positive = negative) / 2."""
    high, low = np.asarray(positive, float), np.asarray(negative, float)
    return auc(np.concatenate([high, low]), np.arange(len(high) + len(low)) < len(high))
