"""Ranges: the affine map that normalises a column of a dataset, from the column's statistics.

The statistics are measured on the episodes of the run. Those in meta/stats.json are not
used: as LeRobot writes them, the quantiles of a dataset are averages of its episodes' quantiles,
which are narrower than the data wherever episodes differ.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.affine import Affine

Numbers = NDArray[np.float64]
NOISE = 1e-4  # a smaller range, relative to the values (1 or more), is that of measurement noise

Statistics = Literal["quantiles", "minmax", "mean_std"]
"""What is -1 and +1: the 1% and 99% quantiles; the extremes; mean -+ standard deviation."""


def measured(values: Tensor, how: Statistics = "quantiles") -> Affine:
    """The map of `values` [N, *shape], per element. An element whose quantiles are equal (a gripper
    that hardly ever closes) gets its extremes, and one that never changes by more than noise keeps
    its scale: normalised with the noise, another value would be thousands."""
    numbers = values.reshape(len(values), -1).double().cpu().numpy()
    low, high = numbers.min(0), numbers.max(0)
    if how == "quantiles":
        inner = np.quantile(numbers, (0.01, 0.99), axis=0)
        varies = _varies(*inner)
        low, high = np.where(varies, inner[0], low), np.where(varies, inner[1], high)
    elif how == "mean_std":
        mean, std = numbers.mean(0), numbers.std(0)
        low, high = mean - std, mean + std
    middle, varies = (low + high) / 2, _varies(low, high)
    low, high = np.where(varies, low, middle), np.where(varies, high, middle)
    return Affine.of_range(_listed(low), _listed(high))


def _varies(low: Numbers, high: Numbers) -> NDArray[np.bool_]:
    return high - low > NOISE * np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))


def reach(values: Tensor, by: Affine) -> float:
    """The largest absolute value of `values` [N, *shape] normalised with `by`."""
    return float(by.to_unit(values.float()).abs().max())


def outside(values: Tensor) -> float:
    """The share of the elements of `values` that are beyond -1 or +1, by more than rounding."""
    return float((values.abs() > 1 + 1e-4).float().mean())


def _listed(values: Any) -> list[float]:
    return [float(value) for value in values]
