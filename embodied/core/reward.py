"""Reward: a number for every row, from anything that can look at rows."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from embodied.core.tensors import Tensors


class Reward(Protocol):
    """Applied by `Relabel` only: at storing time if `frozen`, at sampling time if it learns.

    One that depends on how far training is, or has something to remember, is `Clocked` or `Kept`
    too.
    """

    frozen: bool

    def __call__(self, rows: Tensors) -> Tensor:
        """Rewards [N] (float32) of rows with `obs/*`, `action`, `next_obs/*`, `reward`."""
        ...

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Learn from rows; returns metrics."""
        ...


@runtime_checkable
class Clocked(Protocol):
    """A reward that changes with the steps of training."""

    def at(self, step: int) -> None:
        """`step` environment steps are done; told before rows are stored or sampled."""
        ...


@runtime_checkable
class Kept(Protocol):
    """A reward with a state of its own, for an exact resume."""

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...
