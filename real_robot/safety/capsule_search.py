"""Smallest capsules around triangles: across one axis, in at most three slices where that saves
volume; a seeded search over direction, place and radius of each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.safety.capsules import Capsule

SLICES = 3
WORTH = 0.85  # of the volume: what another slice has to come down to
ROUNDS, TRIES = 60, 32


def fit_body(triangles: Floats) -> list[Capsule]:
    """Capsules that hold all of `triangles` [m, 3, 3]."""
    best = [fit_points(triangles.reshape(-1, 3))]
    axes = [*np.eye(3), *_main_axes(triangles.reshape(-1, 3))]
    for count in range(2, SLICES + 1):
        tried = [fit_slices(triangles, axis, count) for axis in axes]
        less = min(tried, key=_volumes)
        if _volumes(less) < WORTH * _volumes(best):
            best = less
    return best


def fit_slices(triangles: Floats, axis: Floats, count: int) -> list[Capsule]:
    """Capsules of `count` slices across `axis`, cut where their volume is least."""
    along = triangles @ axis
    low, high = float(along.min()), float(along.max())
    cuts = np.linspace(low, high, count + 1)
    grid = np.linspace(low, high, 9)[1:-1]
    coarse = [fit_points(part, rounds=12) for part in _slices(triangles, axis, cuts)]
    for at in range(1, count):
        for place in grid:
            if not cuts[at - 1] < place < cuts[at + 1]:
                continue
            moved = cuts.copy()
            moved[at] = place
            tried = [fit_points(part, rounds=12) for part in _slices(triangles, axis, moved)]
            if _volumes(tried) < _volumes(coarse):
                coarse, cuts = tried, moved
    return [fit_points(part) for part in _slices(triangles, axis, cuts)]


def _slices(triangles: Floats, axis: Floats, cuts: Floats) -> list[Floats]:
    """Points [m, 3] whose hull holds the triangles between two cuts each: corners in between, and
    where edges cross the cuts."""
    along = triangles @ axis
    found: list[Floats] = []
    for low, high in pairwise(cuts):
        points: list[Floats] = [triangles[(along >= low - 1e-9) & (along <= high + 1e-9)]]
        for i, j in ((0, 1), (1, 2), (2, 0)):
            for cut in (low, high):
                a, b = along[:, i], along[:, j]
                over = (a - cut) * (b - cut) < 0
                share = ((cut - a[over]) / (b[over] - a[over]))[:, None]
                points.append(triangles[over, i] * (1 - share) + triangles[over, j] * share)
        found.append(np.concatenate(points))
    return [part for part in found if len(part)]


def fit_points(points: Floats, rounds: int = ROUNDS) -> Capsule:
    """A small capsule around `points` [m, 3]; a seeded search over its direction, place and
    radius."""
    outer = _extremes(points)
    random = np.random.default_rng(0)
    tried = [_search(outer, axis, random, rounds) for axis in _main_axes(outer)]
    start, end, _ = min(tried, key=lambda made: float(_volume(*made)))
    radius = float(_distances(points, start, end).max())
    return Capsule(point(start), point(end), round(radius + 5e-5, 4))


def _search(
    points: Floats, axis: Floats, random: np.random.Generator, rounds: int
) -> tuple[Floats, Floats, float]:
    """The smallest capsule found from `axis` through the middle, by random steps that shrink."""
    size = float(np.ptp(points, axis=0).max())
    state = np.concatenate([axis, (points.min(0) + points.max(0)) / 2, [0.0]])
    best, scale = np.inf, np.array([0.3] * 3 + [0.1 * size] * 3 + [0.3])
    for number in range(rounds):
        steps = random.normal(0, 1, (TRIES, 7)) * scale * 0.93**number
        steps[0] = 0.0
        tried = state + steps
        starts, ends, radii = _around(points, tried)
        volumes = _volume(starts, ends, radii)
        least = int(np.argmin(volumes))
        if volumes[least] <= best:
            best, state = volumes[least], tried[least]
    starts, ends, radii = _around(points, state[None])
    return starts[0], ends[0], float(radii[0])


def _around(points: Floats, states: Floats) -> tuple[Floats, Floats, Floats]:
    """The shortest capsules around `points` [m, 3] along given lines [t, 7], a share thicker than
    they have to be: starts, ends [t, 3] and radii [t]."""
    axis: Floats = states[:, :3] / np.linalg.norm(states[:, :3], axis=1, keepdims=True)
    away = points[:, None] - states[:, 3:6]
    along: Floats = np.einsum("mti,ti->mt", away, axis)
    aside: Floats = np.sqrt(np.maximum((away * away).sum(2) - along * along, 0.0))
    radius: Floats = aside.max(0) * (1 + np.abs(states[:, 6]))
    room: Floats = np.sqrt(np.maximum(radius * radius - aside * aside, 0.0))
    first: Floats = (along + room).min(0)
    last: Floats = (along - room).max(0)
    middle = (first + last) / 2  # where a sphere is enough
    low, high = np.minimum(first, middle), np.maximum(last, middle)
    return states[:, 3:6] + low[:, None] * axis, states[:, 3:6] + high[:, None] * axis, radius


def _distances(points: Floats, start: Floats, end: Floats) -> Floats:
    way = end - start
    share = np.clip((points - start) @ way / max(float(way @ way), 1e-12), 0, 1)
    return np.linalg.norm(points - start - share[:, None] * way, axis=1)


def _extremes(points: Floats) -> Floats:
    """The points that are furthest in one of many directions."""
    random = np.random.default_rng(1)
    ways = random.normal(0, 1, (400, 3))
    return points[np.unique(np.argmax(points @ ways.T, axis=0))]


def _main_axes(points: Floats) -> Floats:
    return np.linalg.svd(points - points.mean(0), full_matrices=False)[2]


def _volume(start: Floats, end: Floats, radius: Any) -> Any:
    length = np.linalg.norm(end - start, axis=-1)
    return np.pi * radius**2 * (length + 4 / 3 * radius)


def _volumes(capsules: list[Capsule]) -> float:
    return float(sum(_volume(np.array(c.start), np.array(c.end), c.radius) for c in capsules))


def rounded(values: Any) -> list[float]:
    """`values` as they are written to a file: -0.0 becomes 0.0."""
    return [round(float(v), 9) + 0.0 for v in values]


def point(values: Any) -> Any:
    """A tuple of metres, to the micrometre."""
    return tuple(round(float(v), 6) + 0.0 for v in values)
