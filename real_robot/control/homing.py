"""Homing: joint-space motion to the home pose, at a share of the joint speed limits.

From pose to pose of its route (`HomeRoute`), resting at each:
q(s) = q_0 + (3 s^2 - 2 s^3) (q_1 - q_0), s from 0 to 1. The peak speed is at s = 1/2:
3/2 (q_1 - q_0) / duration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.source import SetPoint, Source
from embodied.real_robot.safety.workspace import Region

SHARE = 0.25  # share of the velocity limits at the peak
LEAST = 0.2  # s of the last part of the way, at least
NEAR = 1e-3  # rad (m): distance of a set-point that is home
SLOWER = 0.9  # share of the tool's speed limit on the way
LATE = 1.0  # s after which an arm that rests elsewhere does not come home


class Homing(Source):
    """Moves the arm to `home` [n], and opens its hand by `width` (m; None: it stays as it is).

    The way stays inside the `regions`; the `retreat` poses [n] are tried where the straight way
    does not. The tool, whose places [k, 3] (m) `forward` gives, stays slower than `tool_speed`
    (m/s)."""

    def __init__(
        self,
        home: Floats,
        limits: Limits,
        regions: Sequence[Region] = (),
        retreat: Sequence[Floats] = (),
        forward: Callable[[Floats], Floats] | None = None,
        tool_speed: float = np.inf,
        width: float | None = None,
    ) -> None:
        low = np.add(limits.low, limits.margin)
        high = np.subtract(limits.high, limits.margin)
        self.home = np.clip(home, low, high)
        self.velocity = SHARE * np.asarray(limits.velocity)
        self.forward = forward
        self.tool_speed = SLOWER * tool_speed
        self.width = width
        self.point = SetPoint(self.home.copy())
        self._sent = np.zeros_like(self.home)
        self.route = HomeRoute(self.home, low, high, regions, retreat)

    def why_not(self, q: Floats) -> str:
        """Why there is no way home from `q` [n]; empty where there is one."""
        if self.route(q) is not None:
            return ""
        return (
            f"no way home is free: in the straight one is {self.route.blocked_by(q)}; lead the arm "
            "out by hand (embodied robot release), or set robot.retreat"
        )

    def listen(self, now: float) -> None:
        self.point.seen = now

    def begin(self, q: Floats, width: float, now: float) -> None:
        """Begin from rest at `q` [n]: straight (and the chain stops it) where no way is free."""
        poses = [q.copy(), *(self.route(q) or [self.home])]
        self.starts = poses[:-1]
        self.ways = [b - a for a, b in pairwise(poses)]
        times = [self._time(start, way) for start, way in zip(self.starts, self.ways, strict=True)]
        times[-1] = max(LEAST, times[-1])
        self.ends = now + np.cumsum(times)
        self.times = np.maximum(times, 1e-3)
        self.point = SetPoint(q.copy(), width if self.width is None else self.width, now)

    def move(self, arm: ArmState, sent: Floats, now: float, slowed: bool) -> None:
        """`point.problem`: why an arm that rests elsewhere does not come home any more."""
        point = self.point
        leg = min(int(np.searchsorted(self.ends, now)), len(self.ways) - 1)
        s = min(1.0, max(0.0, 1.0 - (self.ends[leg] - now) / self.times[leg]))
        np.multiply(self.ways[leg], (3.0 - 2.0 * s) * s * s, out=point.q)
        point.q += self.starts[leg]
        point.last = bool(now >= self.ends[-1])
        rests = np.array_equal(sent, self._sent)
        if rests and now >= self.ends[-1] + LATE and (np.abs(sent - self.home) > NEAR).any():
            what = self.route.blocked_by(sent)
            far = np.abs(sent - self.home).max()
            point.problem = f"the way home is blocked, {far:.2f} rad before it" + (
                f": {what}" if what else ""
            )
        np.copyto(self._sent, sent)

    def _time(self, start: Floats, way: Floats) -> float:
        """Time (s) for `way` [n] from `start` [n], whose fastest point is its middle."""
        time = 1.5 * float((np.abs(way) / self.velocity).max())
        if self.forward is None:
            return time
        places = self.forward(start + np.linspace(0, 1, COARSE)[:, None] * way)
        length = (COARSE - 1) * float(np.linalg.norm(np.diff(places, axis=0), axis=1).max())
        return max(time, 1.5 * length / self.tool_speed)


ASIDE = (0.3, 0.6, 1.0)  # rad (m) that one joint is moved aside
COARSE = 16  # samples of a way from pose to pose that is checked first
FINE = 0.015  # rad (m) of the joint that moves furthest, between two samples of the way
TRIED = 40  # ways over poses aside that are tried


class HomeRoute:
    """Finds the poses to go through on the way home: straight in joint space where that is free of
    workspace and geometry, else over a few poses between.

    Tried in this order: the straight way; the way that was found last; over each of the `retreat`
    poses; and with one joint moved aside at the start, and one before home (lifting the shoulder,
    folding the elbow, ...), the shortest first."""

    def __init__(
        self, home: Floats, low: Floats, high: Floats, regions: Sequence[Region],
        retreat: Sequence[Floats] = (),
    ) -> None:  # fmt: skip
        self.home = home
        self.low = low
        self.high = high
        self.regions = regions
        self.retreat = [np.clip(pose, low, high) for pose in retreat]
        self._found: list[Floats] = []

    def __call__(self, q: Floats) -> list[Floats] | None:
        """The poses [n] to go through from rest at `q` [n], home last; None: no way is free."""
        for between in ([], self._found, *([pose] for pose in self.retreat)):
            if self._free([q, *between, self.home]):
                self._found = list(between)
                return [*between, self.home]
        way = self._aside(q)
        self._found = [] if way is None else way[:-1]
        return way

    def blocked_by(self, q: Floats) -> str:
        """Name of what blocks the straight way from `q` [n]; empty where it is free."""
        way = _samples([q, self.home])
        for region in self.regions:
            out = _leads_out(region.depths(way))
            if out.any():
                return f"{region.name} ({region.nearest(way[int(np.argmax(out))])[1]})"
        return ""

    def _aside(self, q: Floats) -> list[Floats] | None:
        """The shortest free way over poses near `q` or home with one joint moved."""
        starts = self._reached(q, self._moved(q))
        ends = self._reached(self.home, self._moved(self.home))
        ways: list[list[Floats]] = [[one] for one in [*starts, *ends]]
        ways += [[a, b] for a in starts for b in ends]
        lengths = [np.abs(np.diff([q, *way, self.home], axis=0)).max(1).sum() for way in ways]
        order: list[int] = np.argsort(lengths, kind="stable")[:TRIED].tolist()
        for number in order:
            way = ways[number]
            if self._free([q, *way, self.home]):
                return [*way, self.home]
        return None

    def _moved(self, q: Floats) -> Floats:
        """`q` [n] with one joint moved aside [m, n], within the limits, outside of nothing."""
        steps = np.concatenate([sign * size * np.eye(len(q)) for size in ASIDE for sign in (1, -1)])
        poses = np.clip(q + steps, self.low, self.high)
        return poses[np.all([region.depths(poses) >= 0 for region in self.regions], axis=0)]

    def _reached(self, q: Floats, poses: Floats) -> list[Floats]:
        """The `poses` [m, n] to which the way from `q` [n] is free at coarse samples."""
        way = q + np.linspace(0, 1, COARSE)[:, None, None] * (poses - q)
        for region in self.regions:
            depths = region.depths(way.reshape(-1, len(q))).reshape(COARSE, -1)
            way = way[:, ~_leads_out(depths).any(0)]
        return list(way[-1])

    def _free(self, poses: Sequence[Floats]) -> bool:
        """Whether the way over `poses` is free: at few samples of every part first, then at all."""
        few = np.concatenate(
            [a + np.linspace(0, 1, 6)[:, None] * (b - a) for a, b in pairwise(poses)]
        )
        return self._inside(few) and self._inside(_samples(poses))

    def _inside(self, way: Floats) -> bool:
        return not any(_leads_out(region.depths(way)).any() for region in self.regions)


def _samples(poses: Sequence[Floats]) -> Floats:
    """Positions [k, n] along the straight ways between `poses`, ends included."""
    parts = [poses[0][None]]
    for one, two in pairwise(poses):
        count = max(2, int(np.ceil(np.abs(two - one).max() / FINE)))
        parts.append(one + np.linspace(0, 1, count + 1)[1:, None] * (two - one))
    return np.concatenate(parts)


def _leads_out(depths: Floats) -> NDArray[np.bool_]:
    """Whether each of the depths [k, ...] along a way is outside, and further than one before."""
    inside = np.maximum.accumulate(np.minimum(depths, 0.0), axis=0)
    return depths < inside - 1e-6
