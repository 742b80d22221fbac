"""Geometry: the whole arm as capsules, kept away from planes, boxes and itself.

The links, the hand and what is mounted on them are capsules
(`embodied.real_robot.safety.capsules`). The depth of joint positions is the least clearance of all
of them, less `margin`. All positions, pairs and obstacles are computed at once, by closed forms:
segment to segment (Ericson, 2005, 5.1.9), segment to plane, and segment to box, where half the
derivative of the squared distance along a segment, sum_i d_i (x_i - clip(x_i, -h_i, h_i)), is
piecewise linear and never falls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np

from embodied.core.bounds import Bound, Number, Positive
from embodied.core.build import ConfigError, nearest
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.safety.capsules import Body, Capsule, Kinematics, Model, Point, read_model
from embodied.real_robot.safety.region import Region
from embodied.real_robot.safety.workspace import unit_plane

FAR = 10.0  # m: the clearance of what is not looked at
TINY = 1e-12


@dataclass(frozen=True)
class Plane:
    """A table, a wall, a person's side: the arm stays where a x + b y + c z >= d (base frame)."""

    plane: tuple[Number, Number, Number, Number]  # a, b, c (any length) and d (m, of length 1)
    exempt: tuple[str, ...] = ()  # bodies that may touch it, as fingers a table


@dataclass(frozen=True)
class Box:
    """A solid box: a bin's wall or a camera's post."""

    center: Point  # middle of the box, m, base frame
    half: tuple[Positive, Positive, Positive]  # half of its sides, m
    turn: Point = (0.0, 0.0, 0.0)  # rotation vector from the base frame, rad
    exempt: tuple[str, ...] = ()  # bodies that may touch it

    def __post_init__(self) -> None:
        if not (np.isfinite([*self.center, *self.half, *self.turn]).all() and min(self.half) > 0):
            raise ConfigError("geometry.boxes: center and turn should be finite, half above 0 (m)")


@dataclass(frozen=True)
class Mounted:
    """A capsule that is mounted on a body, as a camera or a gripper."""

    body: str  # body that it is mounted on
    start: Point  # one end, m, in the frame of the joint that moves the body
    end: Point  # other end, m, in the same frame
    radius: Annotated[float, Bound(above=0.0, below=10.0)]  # m


@dataclass(frozen=True)
class Config:
    """The arm's shape, and what it is kept away from."""

    model: str  # fr3, so101, ur5e, or a file that safety.fit_capsules or robot describe wrote
    planes: tuple[Plane, ...] = ()  # half-spaces that the arm stays in
    boxes: tuple[Box, ...] = ()  # boxes that the arm stays out of
    mounted: tuple[Mounted, ...] = ()  # capsules that are added to bodies of the arm
    margin: Annotated[float, Bound(0.0, below=1.0)] = 0.01  # m that stay free between any two
    self_collision: bool = True  # whether the arm is kept off itself too
    ignored: tuple[tuple[str, str], ...] = ()  # pairs of bodies that self_collision leaves out

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ConfigError(f"geometry.margin={self.margin:g} should be from 0 to 1 (m)")
        if not (self.planes or self.boxes or self.self_collision):
            raise ConfigError("geometry: without planes, boxes and self_collision it does nothing")


class Geometry(Region):
    """`depths` of joint positions; `nearest` says which two are that near."""

    name: ClassVar[str] = "geometry"

    def __init__(self, config: Config, joints: int) -> None:
        self.model = _with_mounted(read_model(config.model), config.mounted)
        if len(self.model.joints) != joints:
            raise ConfigError(
                f"geometry.model={config.model} has {len(self.model.joints)} joints, the limits "
                f"have {joints}"
            )
        self.margin = config.margin
        self.kinematics = Kinematics(self.model)
        self.names = [self.model.names[b] for b in self.kinematics.bodies]
        pairs = self._pairs(config) if config.self_collision else []
        self._itself = SelfDistances(self.kinematics, pairs) if pairs else None
        self._planes = np.zeros((0, 4))
        if config.planes:
            rows = [unit_plane(each.plane, "geometry.planes") for each in config.planes]
            self._planes = np.stack(rows)
        self._spared = self._exempt([each.exempt for each in config.planes])
        self._boxes = BoxDistances(config.boxes) if config.boxes else None
        self._thick = self.kinematics.radius - self._exempt([each.exempt for each in config.boxes])

    def depths(self, q: Floats) -> Floats:
        ends = self.kinematics(q)
        least = np.full(len(q), FAR)
        if self._itself is not None:
            np.minimum(least, self._itself(ends).min(1), out=least)
        if len(self._planes):
            np.minimum(least, self._to_planes(ends).min(1), out=least)
        if self._boxes is not None:
            least = self._boxes.least(ends, self._thick, least)
        return least - self.margin

    def nearest(self, q: Floats) -> tuple[float, str]:
        """The depth (m) at `q` [n], and between what."""
        found = [part[0] for part in self._clearances(q[None])]
        part = int(np.argmin([each.min() for each in found]))
        at = int(np.argmin(found[part]))
        return float(found[part][at]) - self.margin, self._label(part, at)

    def _clearances(self, q: Floats) -> list[Floats]:
        """[k, m] each: to itself, planes and boxes, of those that there are."""
        ends = self.kinematics(q)
        found: list[Floats] = []
        if self._itself is not None:
            found.append(self._itself(ends))
        if len(self._planes):
            found.append(self._to_planes(ends))
        if self._boxes is not None:
            found.append((self._boxes(ends) - self._thick).reshape(len(q), -1))
        return found

    def _to_planes(self, ends: Floats) -> Floats:
        first = ends[:, 0] @ self._planes[:, :3].T
        way = ends[:, 1] @ self._planes[:, :3].T
        first += np.minimum(way, 0.0)
        first += self._spared.T - self._planes[:, 3] - self.kinematics.radius[:, None]
        return first.reshape(len(ends), -1)

    def _exempt(self, lists: list[tuple[str, ...]]) -> Floats:
        """[obstacles, C]: FAR where a capsule may touch, or cannot move."""
        spared = np.zeros((len(lists), len(self.names)))
        for row, exempt in zip(spared, lists, strict=True):
            for name in exempt:
                self._known(name)
            row[[name in exempt for name in self.names]] = FAR
            row[~self.kinematics.moving] = FAR
        return spared

    def _known(self, name: str) -> None:
        if name not in self.model.names:
            raise ConfigError(
                f"geometry: the model has no body {name}{nearest(name, self.model.names)}"
            )

    def _pairs(self, config: Config) -> list[tuple[int, int]]:
        """Of capsules, by number."""
        for pair in config.ignored:
            for name in pair:
                self._known(name)
        ignored = {frozenset(pair) for pair in config.ignored}
        bodies = [pair for pair in self.model.pairs if frozenset(pair) not in ignored]
        return [
            (i, j)
            for one, two in bodies
            for i, first in enumerate(self.names)
            if first == one
            for j, second in enumerate(self.names)
            if second == two
        ]

    def _label(self, part: int, at: int) -> str:
        kinds = [self._itself is not None, len(self._planes) > 0, self._boxes is not None]
        kind = [i for i, there in enumerate(kinds) if there][part]
        if kind == 0 and self._itself is not None:
            one, two = self._itself.pairs[at]
            return f"{self.names[one]} and {self.names[two]}"
        count = len(self.names)
        if kind == 1:
            return f"{self.names[at // len(self._planes)]} and plane {at % len(self._planes) + 1}"
        return f"{self.names[at % count]} and box {at // count + 1}"


def _with_mounted(model: Model, mounted: tuple[Mounted, ...]) -> Model:
    bodies = {body.name: body for body in model.bodies}
    for each in mounted:
        if each.body not in bodies:
            raise ConfigError(
                f"geometry.mounted: the model has no body {each.body}{nearest(each.body, bodies)}"
            )
        body = bodies[each.body]
        capsule = Capsule(each.start, each.end, each.radius)
        bodies[each.body] = Body(body.name, body.joint, (*body.capsules, capsule))
    return replace(model, bodies=tuple(bodies.values()))


class SelfDistances:
    """Clearances of pairs of capsules, from the inner products of all starts and ways."""

    def __init__(self, kinematics: Kinematics, pairs: list[tuple[int, int]]) -> None:
        self.pairs = pairs
        i, j = np.array(pairs).T
        count = len(kinematics.radius)
        d1, d2, size = i + count, j + count, 2 * count
        rows = ((i, i), (j, j), (i, j), (d1, i), (d1, j), (d2, i), (d2, j), (d1, d2))
        self._at = np.concatenate([a * size + b for a, b in rows])
        self.a, self.e = kinematics.squares[i], kinematics.squares[j]
        self._over_a = 1 / np.maximum(self.a, TINY)
        self._over_e = 1 / np.maximum(self.e, TINY)
        self._flat = 1e-9 * self.a * self.e + TINY
        self.radii = kinematics.radius[i] + kinematics.radius[j]

    def __call__(self, ends: Floats) -> Floats:
        """[k, pairs] for starts and ways [k, 2, C, 3]."""
        k = len(ends)
        every = ends.reshape(k, -1, 3)
        products = (every @ every.transpose(0, 2, 1)).reshape(k, -1)
        parts = products.take(self._at, axis=1).reshape(k, 8, -1)
        pp, rr, pr, d1p, d1r, d2p, d2r, b = (parts[:, i] for i in range(8))
        c, f = d1p - d1r, d2p - d2r
        size = self.a * self.e - b * b
        s = np.where(size > self._flat, (b * f - c * self.e) / np.maximum(size, TINY), 0.0)
        s = np.minimum(np.maximum(s, 0.0), 1.0)
        t = np.minimum(np.maximum((b * s + f) * self._over_e, 0.0), 1.0)
        s = np.minimum(np.maximum((b * t - c) * self._over_a, 0.0), 1.0)
        square = pp + rr - 2 * pr + s * (s * self.a + 2 * (c - t * b)) + t * (t * self.e - 2 * f)
        return np.sqrt(np.maximum(square, 0.0)) - self.radii


class BoxDistances:
    """Signed distances of segments to boxes; negative where a segment goes through one."""

    def __init__(self, boxes: tuple[Box, ...]) -> None:
        self.centers = np.array([box.center for box in boxes])
        self.half = np.array([box.half for box in boxes])[:, None]
        self.turns = np.stack([_rotation(np.array(box.turn)) for box in boxes])

    def __call__(self, ends: Floats) -> Floats:
        """[k, boxes, C] for starts and ways [k, 2, C, 3]."""
        return _segment_to_box(*self._seen_from(ends))

    def least(self, ends: Floats, thick: Floats, below: Floats) -> Floats:
        """The least of the distances less `thick` [boxes, C], for each of k, or `below` [k] where
        that is less. Only segments whose own bounding boxes are that near are looked at."""
        start, way, half = self._seen_from(ends)
        low, high = np.minimum(way, 0.0), np.maximum(way, 0.0)
        apart = np.maximum(start + low, -start - high)
        apart -= half
        near = np.nonzero(apart.max(-1) - thick < below[:, None, None])
        if len(near[0]):
            away = _segment_to_box(start[near], way[near], half[near])
            below = below.copy()
            np.minimum.at(below, near[0], away - thick[near[1:]])
        return below

    def _seen_from(self, ends: Floats) -> tuple[Floats, Floats, Floats]:
        """Starts and ways [k, boxes, C, 3] in the boxes' frames, and half of the boxes' sides."""
        start = (ends[:, 0][:, None] - self.centers[:, None]) @ self.turns
        way = ends[:, 1][:, None] @ self.turns
        return start, way, np.broadcast_to(self.half, start.shape)


def _segment_to_box(start: Floats, way: Floats, half: Floats) -> Floats:
    """Signed distances of segments [..., 3] to boxes around 0."""
    x = start + _closest(start, way, half)[..., None] * way
    away = np.sqrt(((x - np.clip(x, -half, half)) ** 2).sum(-1))
    through = away < 1e-9
    if through.any():
        away[through] = _deepest(start[through], way[through], half[through])
    return away


def _closest(start: Floats, way: Floats, half: Floats) -> Floats:
    """Where along each segment [..., 3] it is nearest to its box: a share from 0 to 1."""
    safe = np.where(np.abs(way) < TINY, TINY, way)
    shares = np.zeros((*way.shape[:-1], 8))
    shares[..., :3] = (half - start) / safe
    shares[..., 3:6] = (-half - start) / safe
    shares[..., 7] = 1.0
    np.clip(shares, 0.0, 1.0, out=shares)
    slope = _slope(start, way, half, shares)
    low = np.where(slope <= 0, shares, 0.0).max(-1, keepdims=True)
    high = np.where(slope >= 0, shares, 1.0).min(-1, keepdims=True)
    both = np.concatenate([low, np.maximum(low, high)], -1)
    slope = _slope(start, way, half, both)
    rise = np.maximum(slope[..., 1] - slope[..., 0], TINY)
    on = np.clip(-slope[..., 0] / rise, 0.0, 1.0)
    return both[..., 0] + on * (both[..., 1] - both[..., 0])


def _slope(start: Floats, way: Floats, half: Floats, shares: Floats) -> Floats:
    """Half the derivative of the squared distance, at shares [..., m] of segments [..., 3]."""
    x = start[..., None, :] + shares[..., None] * way[..., None, :]
    h = half[..., None, :]
    return ((x - np.clip(x, -h, h)) * way[..., None, :]).sum(-1)


def _deepest(start: Floats, way: Floats, half: Floats) -> Floats:
    """The least, over segments [m, 3], of the largest of the six lines +-x_i - h_i (at most 0)."""
    offset = np.concatenate([start - half, -start - half], 1)
    rise = np.concatenate([way, -way], 1)
    i, j = np.triu_indices(6, 1)
    apart = rise[:, i] - rise[:, j]
    apart = np.where(np.abs(apart) < TINY, TINY, apart)
    shares = np.clip((offset[:, j] - offset[:, i]) / apart, 0.0, 1.0)
    shares = np.concatenate([shares, np.zeros((len(start), 1)), np.ones((len(start), 1))], 1)
    lines = offset[:, None] + shares[..., None] * rise[:, None]
    return np.minimum(lines.max(-1).min(-1), 0.0)


def _rotation(vector: Floats) -> Floats:
    """Rodrigues' formula."""
    angle = float(np.linalg.norm(vector))
    if angle < TINY:
        return np.eye(3)
    cross = np.cross(np.eye(3), vector / angle)
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
