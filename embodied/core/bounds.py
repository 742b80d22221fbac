"""Bounds of settings: the allowed range of a number, written as the type of a dataclass field.

    batch_size: Count = 256  # transitions per gradient step
    gamma: Fraction = 0.99   # discount per environment step
    limit: Annotated[float, Bound(0.1, 50.0)] = 5.0  # N

`core.build.parse` refuses a value outside of its bound in one line. `Number` and `Whole` say that
every finite number, or every whole number, has a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Bound:
    """A closed interval; `above` is an end that is not allowed itself."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        """Whether the number is in the interval; false for NaN and infinity."""
        inside = self.low <= value <= self.high and self.above < value < self.below
        return inside and abs(value) < math.inf  # also for integers that no float holds

    @property
    def text(self) -> str:
        """The interval in words: "at least 1", "above 0, at most 1"."""
        ends = {
            "above": self.above,
            "at least": self.low,
            "below": self.below,
            "at most": self.high,
        }
        known = [f"{word} {end:g}" for word, end in ends.items() if math.isfinite(end)]
        return ", ".join(known) or "a finite number"


@dataclass(frozen=True)
class OrName:
    """A node that a user may also name; whoever reads the setting makes a node of the name."""


Number = Annotated[float, Bound()]
Positive = Annotated[float, Bound(above=0.0)]
NonNegative = Annotated[float, Bound(0.0)]
Fraction = Annotated[float, Bound(0.0, 1.0)]
PositiveFraction = Annotated[float, Bound(above=0.0, high=1.0)]
Whole = Annotated[int, Bound()]
Count = Annotated[int, Bound(1)]
Levels = Annotated[int, Bound(1, 10_000)]  # of a sampler, which keeps numbers of each
Units = Annotated[int, Bound(1, 8192)]  # of a layer: larger ones take gigabytes
Chunk = Annotated[int, Bound(1, 8192)]  # actions of one decision
Few = Annotated[int, Bound(1, 128)]  # networks, layers, heads
CountOrZero = Annotated[int, Bound(0)]
Ranges = Mapping[str, tuple[Number, Number]]  # lowest and highest value, by name
