"""Plateau test: whether a learning curve of success rates still changes.

A line is fitted to the last evaluations. With its slope b per evaluation, the standard error of b,
and w evaluations in the window, the curve still changes if

    |b| (w - 1) > tolerance   and   |b| > z se(b),

that is, if the change over the window is both large and more than noise. The noise of a success
rate p of n episodes is at least sqrt(p (1 - p) / n); a larger residual of the line counts instead.
A curve at zero is flat too: the test says nothing about how good a policy is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST = 5  # evaluations in the window


@dataclass(frozen=True)
class Plateau:
    """`flat`: the curve no longer changes; `since`: the index of the first evaluation from which on
    it does not (None: it changes); `change`: of the fitted line over the window; `noise`: the
    standard error of that change (NaN: too few evaluations)."""

    flat: bool
    since: int | None
    change: float
    noise: float


def plateau(
    values: Sequence[float], episodes: int, tolerance: float = 0.1, z: float = 1.64
) -> Plateau:
    """Test success rates `values` (in [0, 1], equally spaced in time) of `episodes` episodes each.

    The window is the later half, at least LEAST evaluations. With fewer, the curve is not flat."""
    rates = np.asarray(values, np.float64)
    if len(rates) < LEAST:
        return Plateau(False, None, math.nan, math.nan)
    window = max(LEAST, math.ceil(len(rates) / 2))
    change, noise = _trend(rates[-window:], episodes)
    flat = not (abs(change) > tolerance and abs(change) > z * noise)
    if not flat:
        return Plateau(False, None, change, noise)
    first = len(rates) - window
    while first > 0:
        more, error = _trend(rates[first - 1 :], episodes)
        if abs(more) > tolerance and abs(more) > z * error:
            break
        if abs(rates[first - 1] - rates[first:].mean()) > tolerance:
            break
        first -= 1
    return Plateau(True, first, change, noise)


def _trend(rates: NDArray[np.float64], episodes: int) -> tuple[float, float]:
    """The change of the fitted line from the first to the last rate, and its standard error."""
    count = len(rates)
    time = np.arange(count) - (count - 1) / 2
    spread = float((time**2).sum())
    slope = float((time * rates).sum()) / spread
    residual = rates - rates.mean() - slope * time
    mean = float(rates.mean().clip(0.0, 1.0))
    variance = max(float((residual**2).sum()) / (count - 2), mean * (1 - mean) / episodes)
    return slope * (count - 1), math.sqrt(variance / spread) * (count - 1)
