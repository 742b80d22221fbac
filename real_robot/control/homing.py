"""Homing: joint-space motion to the home pose, at a share of the joint speed limits.

From pose to pose of its route (`home_route`), resting at each:
q(s) = q_0 + (3 s^2 - 2 s^3) (q_1 - q_0), s from 0 to 1. The peak speed is at s = 1/2:
3/2 (q_1 - q_0) / duration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from embodied.real_robot.control.arm_state import Floats, Limits
from embodied.real_robot.control.home_route import HomeRoute
from embodied.real_robot.safety.region import Region

SHARE = 0.25  # share of the velocity limits at the peak
LEAST = 0.2  # s of the last part of the way, at least
NEAR = 1e-3  # rad (m): distance of an arm that is home
LATE = 1.0  # s after which an arm that rests elsewhere does not come home


class Homing:
    """Call `begin`, then the object until it returns True: the target has come to `home` [n].

    The way stays inside the `regions`; the `retreat` poses [n] are tried where the straight way
    does not."""

    def __init__(
        self,
        home: Floats,
        limits: Limits,
        regions: Sequence[Region] = (),
        retreat: Sequence[Floats] = (),
    ) -> None:
        low = np.add(limits.low, limits.margin)
        high = np.subtract(limits.high, limits.margin)
        self.home = np.clip(home, low, high)
        self.velocity = SHARE * np.asarray(limits.velocity)
        self.route = HomeRoute(self.home, low, high, regions, retreat)

    def why_not(self, q: Floats) -> str:
        """Why there is no way home from `q` [n]; empty where there is one."""
        if self.route(q) is not None:
            return ""
        return (
            f"no way home is free: in the straight one is {self.route.blocked_by(q)}; lead the arm "
            "out by hand (embodied robot release), or set robot.retreat"
        )

    def begin(self, q: Floats, now: float) -> None:
        """Begin from rest at `q` [n]. Where no way is free the way is straight, and the chain
        stops it."""
        poses = [q.copy(), *(self.route(q) or [self.home])]
        self.starts = poses[:-1]
        self.ways = [b - a for a, b in itertools.pairwise(poses)]
        times = [1.5 * float((np.abs(way) / self.velocity).max()) for way in self.ways]
        times[-1] = max(LEAST, times[-1])
        self.ends = now + np.cumsum(times)
        self.times = np.maximum(times, 1e-3)

    def __call__(self, now: float, out: Floats) -> bool:
        """Write the target [n] for `now` to `out`."""
        leg = min(int(np.searchsorted(self.ends, now)), len(self.ways) - 1)
        s = min(1.0, max(0.0, 1.0 - (self.ends[leg] - now) / self.times[leg]))
        np.multiply(self.ways[leg], (3.0 - 2.0 * s) * s * s, out=out)
        out += self.starts[leg]
        return now >= self.ends[-1]

    def reached(self, q: Floats) -> bool:
        """Whether `q` [n] is home."""
        return bool((np.abs(q - self.home) <= NEAR).all())

    def missed(self, q: Floats, now: float) -> str:
        """Why an arm that rests at `q` [n] does not come home any more; empty where it still
        may."""
        if now < self.ends[-1] + LATE:
            return ""
        what = self.route.blocked_by(q)
        return f"the way home is blocked, {np.abs(q - self.home).max():.2f} rad before it" + (
            f": {what}" if what else ""
        )
