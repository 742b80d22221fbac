"""Controller: what an action means, as joint targets; the role of `robot.controller`."""

from __future__ import annotations

from typing import Protocol

from embodied.embodiments.arrays import Floats, namespace

Reference = dict[str, Floats]


class Controller(Protocol):
    """Joint targets from actions. `names` are those of the action's elements. `physical`: actions
    are joint positions in units of their own, not numbers in [-1, 1]."""

    names: tuple[str, ...]
    physical: bool = False

    def begin(self, q: Floats, width: Floats) -> Reference:
        """The reference at rest at joints `q` [B, n], with the hand open by `width` [B] (m); here
        copies of both, for controllers that keep no more."""
        copy = namespace(q).asarray
        return {"q": copy(q, copy=True), "width": copy(width, copy=True)}

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, n] (rad), hand widths [B] (m) and the next reference, for `action`
        [B, A] in [-1, 1] at measured joints `q` [B, n]."""
        ...
