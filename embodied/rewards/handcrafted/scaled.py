"""Scaled: the world's own reward times a number; evaluation is not touched by it.

Values, temperatures and supports have the unit of the reward: how a learner does in one world at
another scale says how much its settings depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Config:
    """Stored rewards are those of the world times `factor`."""

    factor: float = 1.0


class Scaled:
    """Applied once, when rows are stored."""

    frozen = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, rows: Tensors) -> Tensor:
        return self.config.factor * rows["reward"]

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """There is nothing to learn."""
        return {}
