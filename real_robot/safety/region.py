"""Regions of joint positions that an arm is kept in: the part that all such stages share.

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

PARTS, ROUNDS = 16, 3
"""A line is looked at in so many points at once, so many times: to 1/4096 of its length."""


class Region(ABC):
    """Defined for every target; where no point of the line is inside, the arm stays."""

    name: ClassVar[str]

    @abstractmethod
    def depths(self, q: Floats) -> Floats:
        """How far inside each of the positions `q` [k, n] is, m [k]; negative: outside."""

    def depth(self, q: Floats) -> float:
        """How far inside the worst of positions `q` [k, n] is, m; negative: outside."""
        return float(self.depths(q).min())

    def nearest(self, q: Floats) -> tuple[float, str]:
        """The depth (m) at `q` [n], and of what."""
        return self.depth(q[None]), self.name

    def begin(self, arm: ArmState) -> None:  # noqa: B027
        """Nothing is remembered."""

    def __call__(self, tick: Tick) -> None:
        # Outside already: anything that is less far outside will do.
        now, wanted = self.depths(np.stack([tick.last, tick.q]))
        enough = min(0.0, float(now))
        if wanted >= 0 or (enough < 0 and wanted > enough):
            return
        way = tick.q - tick.last
        near, far = 0.0, 1.0
        for _ in range(ROUNDS):
            shares = near + (far - near) * _PARTS
            out = self.depths(tick.last + shares[:, None] * way) < enough
            first = int(np.argmax(out)) if out.any() else PARTS - 1
            near, far = near if first == 0 else float(shares[first - 1]), float(shares[first])
        np.multiply(way, near, out=tick.q)
        tick.q += tick.last


_PARTS = np.arange(1, PARTS + 1) / PARTS
