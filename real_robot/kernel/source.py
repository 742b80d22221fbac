"""Where the kernel gets its set-points from: declared here, implemented outside of the kernel.

A source (a policy's chunks, the way home) says in every tick where it wants the arm. Nothing that
it says is trusted: what is no set-point is a latched fault, and so is a source that raises or takes
too long. A source needs no object of the kernel: in another process it would fill a mailbox of
`SetPoint`s, and learn from the state message when to begin and where the arm is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied.real_robot.kernel.arm_state import ArmState, Floats


@dataclass(slots=True)
class SetPoint:
    """What a source wants, and for the state message what it follows."""

    q: Floats
    """Joint target [n], rad (m)."""
    width: float = 0.0
    """Opening of the hand, m."""
    seen: float = -math.inf
    """Time (s) of the observation that the target comes from."""
    last: bool = False
    """Whether the motion ends at `q`."""
    problem: str = ""
    """Why the arm should stop for good, in one line; empty: nothing."""
    starved: bool = True
    """Whether there is nothing to follow."""
    step: int = -1
    """Number of the step of a policy that is followed."""
    action: Floats = field(default_factory=lambda: np.zeros(0))
    """The action of that step [A]."""
    intervened: bool = False
    """Whether the action is a person's."""
    reference: Floats | None = None
    """Where that step leads the arm [n], rad (m); None: to `q`."""
    paused: float = 0.0
    """Time (s) for which the source waited for a slow arm."""


class Source(ABC):
    """Moves an arm. `point` is the newest set-point; each method may change it."""

    point: SetPoint

    def listen(self, now: float) -> None:
        """Take what has come from elsewhere; called once in every tick of every mode."""
        return

    def why_not(self, q: Floats) -> str:
        """Why no motion can begin from rest at `q` [n], in one line; empty where one can."""
        return ""

    @abstractmethod
    def begin(self, q: Floats, width: float, now: float) -> None:
        """Begin from rest at `q` [n], with the hand `width` m open."""

    @abstractmethod
    def move(self, arm: ArmState, sent: Floats, now: float, slowed: bool) -> None:
        """Set `point` for the tick at `now` (s). The arm is measured at `arm`, and was sent to
        `sent` [n] in the tick before. `slowed`: the limit of the tool's speed held it back."""

    def forget(self) -> None:
        """Drop what has come from elsewhere: an operator has reset, and it may be of before."""
        return


def problem_of(point: Any, joints: int) -> str:
    """Why `point`, which a source gave, cannot be followed by an arm of so many `joints`; empty
    where it can. Values that are not finite are the safety chain's business."""
    if not isinstance(point, SetPoint):
        return f"a source gave {type(point).__name__} for a set-point"
    q: Any = point.q
    if getattr(q, "shape", None) != (joints,) or getattr(q, "dtype", None) != np.float64:
        return f"a set-point has {_said(q)} for the positions of {joints} joints"
    for name in ("width", "seen"):
        if not isinstance(getattr(point, name), int | float):
            return f"a set-point has {_said(getattr(point, name))} for its {name}"
    return point.problem if isinstance(point.problem, str) else _said(point.problem)  # pyright: ignore[reportUnnecessaryIsInstance]


def _said(value: object) -> str:
    """A few words about a value that is none."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {shape}")
