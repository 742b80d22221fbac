"""Reward: a number for every row, from anything that can look at rows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from embodied.core.tensors import Tensors


class Reward(Protocol):
    """Applied by `Relabel` only: at storing time if `frozen`, at sampling time if it learns."""

    frozen: bool

    def __call__(self, rows: Tensors) -> Tensor:
        """Rewards [N] (float32) of rows with `obs/*`, `action`, `next_obs/*`, `reward`."""
        ...

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Learn from rows; returns metrics."""
        ...
