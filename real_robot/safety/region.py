"""Region: the base of the stages that keep an arm inside a set of joint positions.

A target outside is pulled back along the straight line, in joint space, from the positions sent
last: to the furthest point of that line before it first leads out. An arm that is outside already
may only move closer to the inside. The limiter takes the same regions as its guards, so that
neither the path to a target nor a motion to rest leads out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from embodied.real_robot.control.arm_state import ArmState, Floats
from embodied.real_robot.safety.chain import Tick

PARTS = 16
"""Points of a line that are checked at once."""
ROUNDS = 3
"""Times that the line is divided: to PARTS^-ROUNDS = 1/4096 of its length."""
SHARES = np.arange(1, PARTS + 1) / PARTS


class Region(ABC):
    """Where no point of the line to a target is inside, the arm stays where it was sent."""

    name: ClassVar[str]

    @abstractmethod
    def depths(self, q: Floats) -> Floats:
        """Distance [k] (m) of each of the positions `q` [k, n] from the region's border; negative:
        outside."""

    def depth(self, q: Floats) -> float:
        """Smallest depth (m) of the positions `q` [k, n]; negative: outside."""
        return float(self.depths(q).min())

    def nearest(self, q: Floats) -> tuple[float, str]:
        """The depth (m) at `q` [n], and the name of what is nearest to the border."""
        return self.depth(q[None]), self.name

    def begin(self, arm: ArmState) -> None:  # noqa: B027
        """Nothing is remembered."""

    def __call__(self, tick: Tick) -> None:
        depth_last, depth_wanted = self.depths(np.stack([tick.last, tick.q]))
        # An arm that is outside already may go to where it is less far outside.
        least_depth = min(0.0, float(depth_last))
        if depth_wanted >= 0 or (least_depth < 0 and depth_wanted > least_depth):
            return
        step = tick.q - tick.last
        inside = 0.0  # share of the step that is allowed
        outside = 1.0  # share of the step that is not
        for _ in range(ROUNDS):
            shares = inside + (outside - inside) * SHARES
            leaves = self.depths(tick.last + shares[:, None] * step) < least_depth
            first = int(np.argmax(leaves)) if leaves.any() else PARTS - 1
            if first > 0:
                inside = float(shares[first - 1])
            outside = float(shares[first])
        np.multiply(step, inside, out=tick.q)
        tick.q += tick.last
