"""Homing: joint-space motion to the home pose, at a share of the joint speed limits.

q(s) = q_0 + (3 s^2 - 2 s^3) (q_home - q_0), s from 0 to 1. The peak speed is at s = 1/2:
3/2 (q_home - q_0) / duration.
"""

from __future__ import annotations

import numpy as np

from real_robot.control.arm_state import Floats, Limits

SHARE = 0.25  # of the velocity limits
LEAST = 0.2  # s


class Homing:
    """`begin`, then call until it says True: the target has come to `home` [n]."""

    def __init__(self, home: Floats, limits: Limits) -> None:
        low, high = np.add(limits.low, limits.margin), np.subtract(limits.high, limits.margin)
        self.home = np.clip(home, low, high)
        self.velocity = SHARE * np.asarray(limits.velocity)

    def begin(self, q: Floats, now: float) -> None:
        """From rest at `q` [n]."""
        self.start, self.origin = q.copy(), now
        self.way = self.home - q
        self.duration = max(LEAST, 1.5 * float((np.abs(self.way) / self.velocity).max()))

    def __call__(self, now: float, out: Floats) -> bool:
        """Write the target [n] for `now` to `out`."""
        s = min(1.0, (now - self.origin) / self.duration)
        np.multiply(self.way, (3.0 - 2.0 * s) * s * s, out=out)
        out += self.start
        return s >= 1.0
