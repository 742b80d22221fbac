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
from embodied.embodiments.fr3 import rotation
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.safety.capsules import Body, Capsule, Kinematics, Model, Point, read_model
from embodied.real_robot.safety.workspace import Region, unit_plane

FAR = 10.0  # m: clearance of pairs that are not checked
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

    model: str  # fr3, so101, ur5e, or an arm file of `embodied robot describe`
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
    """The depth of joint positions is the least clearance of the arm, less the margin."""

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
        self._pair_distances = SelfDistances(self.kinematics, pairs) if pairs else None
        self._planes = np.zeros((0, 4))
        """Planes [p, 4]: unit normals and offsets (m)."""
        if config.planes:
            planes = [unit_plane(each.plane, "geometry.planes") for each in config.planes]
            self._planes = np.stack(planes)
        self._plane_exemptions = self._exemptions([each.exempt for each in config.planes])
        """Distances [p, C] (m) that are added to clearances: FAR for exempt capsules, else 0."""
        self._box_distances = BoxDistances(config.boxes) if config.boxes else None
        box_exemptions = self._exemptions([each.exempt for each in config.boxes])
        self._box_radii = self.kinematics.radius - box_exemptions
        """Radii [boxes, C] (m) of the capsules, less the exemptions."""

    def depths(self, q: Floats) -> Floats:
        ends = self.kinematics(q)
        least = np.full(len(q), FAR)
        if self._pair_distances is not None:
            np.minimum(least, self._pair_distances(ends).min(1), out=least)
        if len(self._planes):
            np.minimum(least, self._plane_clearances(ends).min(1), out=least)
        if self._box_distances is not None:
            least = self._box_distances.least(ends, self._box_radii, least)
        return least - self.margin

    def nearest(self, q: Floats) -> tuple[float, str]:
        """The depth (m) at `q` [n], and the names of the two that are that near."""
        kinds = {name: clearances[0] for name, clearances in self._clearances(q[None]).items()}
        kind = min(kinds, key=lambda name: float(kinds[name].min()))
        number = int(np.argmin(kinds[kind]))
        return float(kinds[kind][number]) - self.margin, self._label(kind, number)

    def _clearances(self, q: Floats) -> dict[str, Floats]:
        """Clearances [k, m] (m) of pairs, planes and boxes at `q` [k, n], where there are any."""
        ends = self.kinematics(q)
        found: dict[str, Floats] = {}
        if self._pair_distances is not None:
            found["pair"] = self._pair_distances(ends)
        if len(self._planes):
            found["plane"] = self._plane_clearances(ends)
        if self._box_distances is not None:
            clearances = self._box_distances(ends) - self._box_radii
            found["box"] = clearances.reshape(len(q), -1)
        return found

    def _plane_clearances(self, ends: Floats) -> Floats:
        """Clearances [k, C p] (m) of all capsules from all planes."""
        normals = self._planes[:, :3].T
        lowest = ends[:, 0] @ normals + np.minimum(ends[:, 1] @ normals, 0.0)
        lowest += self._plane_exemptions.T - self._planes[:, 3] - self.kinematics.radius[:, None]
        return lowest.reshape(len(ends), -1)

    def _exemptions(self, exempt: list[tuple[str, ...]]) -> Floats:
        """Distances [obstacles, C] (m): FAR where a capsule may touch the obstacle or cannot move,
        else 0. `exempt`: bodies that may touch each obstacle."""
        distances = np.zeros((len(exempt), len(self.names)))
        for obstacle, bodies in zip(distances, exempt, strict=True):
            for name in bodies:
                self._require_body(name)
            obstacle[[name in bodies for name in self.names]] = FAR
            obstacle[~self.kinematics.moving] = FAR
        return distances

    def _require_body(self, name: str) -> None:
        if name not in self.model.names:
            raise ConfigError(
                f"geometry: the model has no body {name}{nearest(name, self.model.names)}"
            )

    def _pairs(self, config: Config) -> list[tuple[int, int]]:
        """Pairs of numbers of the capsules that are kept apart."""
        for pair in config.ignored:
            for name in pair:
                self._require_body(name)
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

    def _label(self, kind: str, number: int) -> str:
        """The names of the two of clearance `number` of a `kind` of `_clearances`."""
        if kind == "pair" and self._pair_distances is not None:
            first, second = self._pair_distances.pairs[number]
            return f"{self.names[first]} and {self.names[second]}"
        if kind == "plane":
            capsule, plane = divmod(number, len(self._planes))
            return f"{self.names[capsule]} and plane {plane + 1}"
        box, capsule = divmod(number, len(self.names))
        return f"{self.names[capsule]} and box {box + 1}"


def _with_mounted(model: Model, mounted: tuple[Mounted, ...]) -> Model:
    """`model` with the capsules `mounted` on its bodies; ConfigError for an unknown body."""
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
    """Clearances of pairs of capsules, from inner products of all starts and axes.

    Capsule i is the segment p + s d1, capsule j the segment r + t d2, s and t from 0 to 1. With
    a = d1 d1, e = d2 d2, b = d1 d2, c = d1 (p - r), f = d2 (p - r), the nearest points of the two
    lines are at s = (b f - c e) / (a e - b b), t = (b s + f) / e; both are clipped to the segments.
    """

    def __init__(self, kinematics: Kinematics, pairs: list[tuple[int, int]]) -> None:
        self.pairs = pairs
        i, j = np.array(pairs).T
        count = len(kinematics.radius)
        size = 2 * count  # starts of all capsules, then their axes
        d1 = i + count
        d2 = j + count
        products = ((i, i), (j, j), (i, j), (d1, i), (d1, j), (d2, i), (d2, j), (d1, d2))
        self._entries = np.concatenate([row * size + column for row, column in products])
        """Entries of the flat matrix of inner products that are used."""
        self.a = kinematics.squares[i]
        self.e = kinematics.squares[j]
        self._over_a = 1 / np.maximum(self.a, TINY)
        self._over_e = 1 / np.maximum(self.e, TINY)
        self._parallel = 1e-9 * self.a * self.e + TINY
        self.radii = kinematics.radius[i] + kinematics.radius[j]

    def __call__(self, ends: Floats) -> Floats:
        """Clearances [k, pairs] (m) for starts and axes [k, 2, C, 3]."""
        k = len(ends)
        vectors = ends.reshape(k, -1, 3)
        products = (vectors @ vectors.transpose(0, 2, 1)).reshape(k, -1)
        parts = products.take(self._entries, axis=1).reshape(k, 8, -1)
        pp, rr, pr, d1p, d1r, d2p, d2r, b = (parts[:, i] for i in range(8))
        c = d1p - d1r
        f = d2p - d2r
        size = self.a * self.e - b * b
        s = np.where(size > self._parallel, (b * f - c * self.e) / np.maximum(size, TINY), 0.0)
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
        self.turns = rotation(np.array([box.turn for box in boxes]))

    def __call__(self, ends: Floats) -> Floats:
        """Distances [k, boxes, C] (m) for starts and axes [k, 2, C, 3]."""
        return _segment_to_box(*self._in_box_frames(ends))

    def least(self, ends: Floats, radii: Floats, bound: Floats) -> Floats:
        """The least clearance [k] (m): of distances less `radii` [boxes, C], and of `bound` [k].
        Only segments whose own bounding boxes are nearer than `bound` are computed."""
        start, axis, half = self._in_box_frames(ends)
        gap = np.maximum(start + np.minimum(axis, 0.0), -start - np.maximum(axis, 0.0))
        gap -= half
        near = np.nonzero(gap.max(-1) - radii < bound[:, None, None])
        if len(near[0]):
            distances = _segment_to_box(start[near], axis[near], half[near])
            bound = bound.copy()
            np.minimum.at(bound, near[0], distances - radii[near[1:]])
        return bound

    def _in_box_frames(self, ends: Floats) -> tuple[Floats, Floats, Floats]:
        """Starts and axes in the boxes' frames, and half of the boxes' sides, [k, boxes, C, 3]."""
        start = (ends[:, 0][:, None] - self.centers[:, None]) @ self.turns
        axis = ends[:, 1][:, None] @ self.turns
        return start, axis, np.broadcast_to(self.half, start.shape)


def _segment_to_box(start: Floats, axis: Floats, half: Floats) -> Floats:
    """Signed distances [...] (m) of segments [..., 3] to boxes around 0."""
    nearest = start + _nearest_share(start, axis, half)[..., None] * axis
    distances = np.sqrt(((nearest - np.clip(nearest, -half, half)) ** 2).sum(-1))
    inside = distances < 1e-9
    if inside.any():
        distances[inside] = _penetration(start[inside], axis[inside], half[inside])
    return distances


def _nearest_share(start: Floats, axis: Floats, half: Floats) -> Floats:
    """Share [...] of each segment [..., 3], from 0 to 1, at which it is nearest to its box.

    Half the derivative of the squared distance is piecewise linear and never falls; its corners are
    where the segment crosses the planes of the box's sides."""
    divisor = np.where(np.abs(axis) < TINY, TINY, axis)
    corners = np.zeros((*axis.shape[:-1], 8))
    corners[..., :3] = (half - start) / divisor
    corners[..., 3:6] = (-half - start) / divisor
    corners[..., 7] = 1.0
    np.clip(corners, 0.0, 1.0, out=corners)
    slope = _slope(start, axis, half, corners)
    low = np.where(slope <= 0, corners, 0.0).max(-1, keepdims=True)
    high = np.where(slope >= 0, corners, 1.0).min(-1, keepdims=True)
    bracket = np.concatenate([low, np.maximum(low, high)], -1)
    slope = _slope(start, axis, half, bracket)
    rise = np.maximum(slope[..., 1] - slope[..., 0], TINY)
    share = np.clip(-slope[..., 0] / rise, 0.0, 1.0)
    return bracket[..., 0] + share * (bracket[..., 1] - bracket[..., 0])


def _slope(start: Floats, axis: Floats, half: Floats, shares: Floats) -> Floats:
    """Half the derivative of the squared distance, at `shares` [..., m] of segments [..., 3]."""
    x = start[..., None, :] + shares[..., None] * axis[..., None, :]
    h = half[..., None, :]
    return ((x - np.clip(x, -h, h)) * axis[..., None, :]).sum(-1)


def _penetration(start: Floats, axis: Floats, half: Floats) -> Floats:
    """Signed distances [m] (m, at most 0) of segments [m, 3] that cross their boxes.

    Along a segment the signed distance is the largest of the six lines +-x_i - h_i; its minimum is
    at an end, or where two of the lines cross."""
    offset = np.concatenate([start - half, -start - half], 1)
    rise = np.concatenate([axis, -axis], 1)
    i, j = np.triu_indices(6, 1)
    difference = rise[:, i] - rise[:, j]
    difference = np.where(np.abs(difference) < TINY, TINY, difference)
    shares = np.clip((offset[:, j] - offset[:, i]) / difference, 0.0, 1.0)
    shares = np.concatenate([shares, np.zeros((len(start), 1)), np.ones((len(start), 1))], 1)
    lines = offset[:, None] + shares[..., None] * rise[:, None]
    return np.minimum(lines.max(-1).min(-1), 0.0)
