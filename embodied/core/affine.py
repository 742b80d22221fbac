"""Affine: the linear map between physical values and normalised values, per element of a leaf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Number
from embodied.core.build import ConfigError

LEAST = 1e-6  # a smaller range, relative to the values, counts as constant


@dataclass(frozen=True)
class Affine:
    """A linear map of the flattened elements of a leaf.

    Nothing is clamped: a physical value beyond `high` is above +1. `low` may be above `high` (an
    axis that points the other way), but not equal to it. ConfigError for other numbers.
    """

    low: tuple[Number, ...]  # the physical value of -1 of each element
    high: tuple[Number, ...]  # the physical value of +1 of each element

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high) or not self.low:
            raise ConfigError(f"low has {len(self.low)} numbers and high has {len(self.high)}")
        if not all(map(math.isfinite, (*self.low, *self.high))):
            raise ConfigError("low and high should be finite numbers")
        same = [i for i, (a, b) in enumerate(zip(self.low, self.high, strict=True)) if a == b]
        if same:
            raise ConfigError(f"low and high are equal in element {same[0]} ({self.low[same[0]]})")

    @classmethod
    def of_range(cls, low: Sequence[float], high: Sequence[float]) -> Affine:
        """The map of measured ranges; an element that does not vary keeps its scale (radius 1)."""
        wide = [
            (a, b) if abs(b - a) > LEAST * max(1.0, abs(a), abs(b)) else (a - 1.0, a + 1.0)
            for a, b in zip(low, high, strict=True)
        ]
        return cls(tuple(float(a) for a, _ in wide), tuple(float(b) for _, b in wide))

    @property
    def size(self) -> int:
        return len(self.low)

    def to_unit(self, x: Tensor) -> Tensor:
        """Physical values [..., *shape] as normalised values, whose -1 is `low` and +1 is `high`.
        `shape` is any whose elements are `size`; ValueError if the last dimensions are none."""
        middle, radius = self._terms(x)
        return (x.to(middle.dtype) - middle) / radius

    def to_physical(self, x: Tensor) -> Tensor:
        middle, radius = self._terms(x)
        return x.to(middle.dtype) * radius + middle

    @property
    def data_range(self) -> Tensor:
        """Low and high physical values [2, size] of the data that the map was measured on: an
        element that did not vary there has the one value that it had (`of_range`)."""
        ends = torch.tensor([self.low, self.high], dtype=torch.float64)
        constant = ((ends[1] - ends[0]) - 2.0).abs() < 1e-9
        return torch.where(constant, ends.mean(0), ends)

    def to_json(self) -> dict[str, list[float]]:
        return {"low": list(self.low), "high": list(self.high)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Affine:
        return cls(tuple(map(float, data["low"])), tuple(map(float, data["high"])))

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Middle and radius in the shape of one row of `x`."""
        shape = last_dims(tuple(x.shape), self.size)
        kind = x.dtype if x.is_floating_point() else torch.float32
        low, high = (
            torch.tensor(each, dtype=torch.float64, device=x.device).view(shape)
            for each in (self.low, self.high)
        )
        return ((high + low) / 2).to(kind), ((high - low) / 2).to(kind)


def last_dims(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The fewest last dimensions of `shape` that have `size` elements."""
    for count in range(len(shape) + 1):
        if math.prod(shape[len(shape) - count :]) == size and (count or size == 1):
            return shape[len(shape) - count :]
    if size == 1:
        return ()
    raise ValueError(f"values of shape {list(shape)} do not end in {size} elements")
