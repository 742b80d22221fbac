"""Statistics of a dataset's columns, per episode and pooled, in LeRobot's form."""

# pyright: basic
# (pyarrow and PyAV have no types)
from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from embodied.datasets.lerobot.schema import Column

QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)


def statistics(column: Column, values: Tensor) -> dict[str, np.ndarray]:
    """Minimum, maximum, mean, deviation, count and quantiles of `values` [T, *shape], per element.

    Pictures: per channel in [0, 1], shape [C, 1, 1], from at most 50 steps and 4,096 pixels each.
    """
    count = np.array([len(values)])
    if column.stored:
        some = values[:: max(1, len(values) // 50)].cpu().numpy() / 255.0
        pixels = some.reshape(len(some), -1, some.shape[-1])
        numbers = pixels[:, :: max(1, pixels.shape[1] // 4096)].reshape(-1, some.shape[-1])
    else:
        numbers = values.cpu().reshape(len(values), -1).double().numpy()
    low, high = numbers.min(0), numbers.max(0)
    result = {"min": low, "max": high, "mean": numbers.mean(0), "std": numbers.std(0)}
    for q, value in zip(QUANTILES, np.quantile(numbers, QUANTILES, axis=0), strict=True):
        result[f"q{round(q * 100):02d}"] = value
    if column.stored:
        result = {name: value.reshape(-1, 1, 1) for name, value in result.items()}
    return result | {"count": count}


def pool(each: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One column's statistics over all episodes, from those of every episode ([E, ...] arrays).

    Exact but for the quantiles, which are averaged by length, as LeRobot does.
    """
    count = each["count"].reshape(-1, *[1] * (each["mean"].ndim - 1))
    share = count / count.sum()
    mean = (each["mean"] * share).sum(0)
    variance = ((each["std"] ** 2 + (each["mean"] - mean) ** 2) * share).sum(0)
    pooled = {name: (value * share).sum(0) for name, value in each.items() if name[0] == "q"}
    pooled |= {"min": each["min"].min(0), "max": each["max"].max(0), "mean": mean}
    return pooled | {"std": np.sqrt(variance), "count": each["count"].sum(0)}
