"""Motion that a leader arm's pose means for the arm that follows its tool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from embodied.core.bounds import Bound, Number, Positive
from embodied.embodiments.kinematics.arms_file import forward_of
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.teleop.teleop import NO_INPUT, Held

HALF_SECOND = 0.5


@dataclass(frozen=True)
class Reach:
    """How a leader's tool leads the follower's."""

    kinematics: str  # as in a deployment
    step: Annotated[float, Bound(above=0.0, high=1.0)] = 0.025  # m that an action of 1 moves
    scale: Positive = 1.0  # the follower's way from origin per the leader's
    origin: tuple[Number, Number, Number] = (0.0, 0.0, 0.0)  # where both tools are at one place, m
    still: Annotated[float, Bound(0.0, 1.0)] = 0.003  # m in half a second from which it is held


class LeaderMotion:
    """Actions towards the place of the leader's tool."""

    def __init__(self, reach: Reach, clock: Callable[[], float]) -> None:
        self.reach = reach
        self.clock = clock
        self.forward = forward_of(reach.kinematics)
        self.moved = -np.inf
        self.last = np.full(3, np.inf)

    def __call__(self, q: Floats, grip: float, tool: tuple[float, float, float] | None) -> Held:
        """The motion for a leader at joints `q` [n] with its hand at `grip`, and a follower's
        tool at `tool` (m)."""
        reach = self.reach
        origin = np.asarray(reach.origin)
        place = origin + reach.scale * (self.forward(q[None])[0][0] - origin)
        now = self.clock()
        if np.linalg.norm(place - self.last) > reach.still:
            self.moved = now if np.isfinite(self.last).all() else self.moved
            self.last = place
        if tool is None or now > self.moved + HALF_SECOND:
            return NO_INPUT
        x, y, z = ((place - np.asarray(tool)) / reach.step).tolist()
        return Held((x, y, z, 0.0, 0.0, 0.0), grip, True)
