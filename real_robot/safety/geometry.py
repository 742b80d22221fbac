"""Geometry: the whole arm as capsules, kept away from planes, boxes and itself.

A capsule is a segment with a radius. Each belongs to a body (a link, the hand, what is mounted on
them), each body moves with one joint of the arm or stays with its base. Model files are YAML: arm
files of `embodied robot describe`, and for arms of this repository
`embodied/embodiments/*_capsules.yaml`.

The depth of joint positions is the least clearance of all capsules, less `margin`. All positions,
pairs and obstacles are computed at once, by closed forms: segment to segment (Ericson, 2005,
5.1.9), segment to plane, and segment to box, where half the derivative of the squared distance
along a segment, sum_i d_i (x_i - clip(x_i, -h_i, h_i)), is piecewise linear and never falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import yaml

from embodied.core.bounds import Bound, Number, Positive
from embodied.core.build import ConfigError, nearest, parse
from embodied.embodiments.fr3 import rotation
from embodied.embodiments.kinematics.arm import ArmsFile, Placed, read_arms_file
from embodied.embodiments.kinematics.chain import Joint
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.safety.workspace import Region, unit_plane

Point = tuple[Number, Number, Number]


@dataclass(frozen=True)
class Capsule:
    """A segment with a radius, in the frame of what its body moves with."""

    start: Point  # one end, m
    end: Point  # other end, m
    radius: Annotated[float, Bound(above=0.0, below=10.0)]  # m

    def __post_init__(self) -> None:
        if not (0 < self.radius < 10 and np.isfinite([*self.start, *self.end]).all()):
            raise ConfigError("geometry: a capsule needs finite ends and a radius above 0 (m)")


@dataclass(frozen=True)
class Body:
    """A part of an arm that moves with one joint, or stays with the base."""

    name: str  # as in the arm's model
    joint: Annotated[int, Bound(-1)]  # number of the joint that moves it; -1: the base
    capsules: tuple[Capsule, ...]  # its shape


@dataclass(frozen=True)
class Model:
    """The shape of an arm."""

    joints: tuple[Joint, ...]  # in the driver's order
    bodies: tuple[Body, ...]  # what moves with them
    pairs: tuple[tuple[str, str], ...]  # pairs of bodies that can come near each other

    def __post_init__(self) -> None:
        for i, joint in enumerate(self.joints):
            if not -1 <= joint.parent < i:
                raise ConfigError(f"geometry: joint {joint.name} comes before its parent")
        for body in self.bodies:
            if not -1 <= body.joint < len(self.joints):
                raise ConfigError(f"geometry: body {body.name} moves with no joint")
        if unknown := {name for pair in self.pairs for name in pair} - set(self.names):
            raise ConfigError(f"geometry: pairs name {min(unknown)}, which is no body")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(body.name for body in self.bodies)


@lru_cache(maxsize=8)
def read_model(name: str) -> Model:
    """The model of an arm of this repository (`fr3`), or of a file; ConfigError."""
    if (several := read_arms_file(name)) is not None:
        return joined_model(several)
    shipped = files("embodied.embodiments")
    path = Path(name) if name.endswith((".yaml", ".yml")) else None
    source: Any = path if path is not None else shipped / f"{name}_capsules.yaml"
    try:
        node = yaml.load(source.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError) as error:
        known = sorted(f.name[:-14] for f in shipped.iterdir() if f.name.endswith("_capsules.yaml"))
        raise ConfigError(
            f"geometry.model={name} cannot be read ({type(error).__name__}); known are "
            f"{', '.join(known)}, or an arm file that `embodied robot describe` wrote"
        ) from error
    if not isinstance(node, dict):
        raise ConfigError(f"geometry.model={name} should hold joints, bodies and pairs")
    parts = cast(dict[str, Any], node)
    if "format" in parts:  # an arm file, which `embodied robot describe` wrote
        nothing: list[Any] = []
        parts = {key: parts.get(key) or nothing for key in ("joints", "bodies", "pairs")}
    return parse(Model, parts, "geometry.model")


def joined_model(table: ArmsFile) -> Model:
    """The shapes of several arms on one base, and every pair of bodies of two different arms."""
    joints: list[Joint] = []
    bodies: list[Body] = []
    pairs: list[tuple[str, str]] = []
    for name, placed in table.arms.items():
        model, first = read_model(placed.capsules or placed.arm), len(joints)
        own = [f"{name}_{body.name}" for body in model.bodies]
        pairs += [(f"{name}_{one}", f"{name}_{two}") for one, two in model.pairs]
        pairs += [(body.name, mine) for body in bodies for mine in own]
        joints += [_placed_joint(name, joint, first, placed) for joint in model.joints]
        bodies += [_placed_body(name, body, first, placed) for body in model.bodies]
        if placed.hand:  # it moves no body: the hand's capsules hold all of its stroke
            eye = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
            last, zero = len(joints) - 1, (0.0, 0.0, 0.0)
            joints.append(Joint(f"{name}_gripper", last, zero, eye, (1.0, 0.0, 0.0), True))
    still = {body.name for body in bodies if body.joint < 0}
    moving = [pair for pair in pairs if not still.issuperset(pair)]
    return Model(tuple(joints), tuple(bodies), tuple(moving))


def _placed_joint(name: str, joint: Joint, first: int, placed: Placed) -> Joint:
    """`joint` with its arm's prefix, behind the `first` joints of other arms."""
    if joint.parent >= 0:
        return replace(joint, name=f"{name}_{joint.name}", parent=joint.parent + first)
    turn = (placed.rotation @ np.reshape(joint.turn, (3, 3))).ravel()
    place = _moved(joint.place, placed)
    return replace(joint, name=f"{name}_{joint.name}", place=place, turn=tuple(turn.tolist()))


def _placed_body(name: str, body: Body, first: int, placed: Placed) -> Body:
    capsules = body.capsules
    if body.joint < 0:
        ends = [(_moved(c.start, placed), _moved(c.end, placed), c.radius) for c in capsules]
        capsules = tuple(Capsule(*each) for each in ends)
    joint = body.joint + first if body.joint >= 0 else -1
    return Body(f"{name}_{body.name}", joint, capsules)


def _moved(point: Point, placed: Placed) -> Point:
    x, y, z = (placed.rotation @ np.asarray(point) + np.asarray(placed.place)).tolist()
    return x, y, z


class Kinematics:
    """The axes of all capsules of a model at joint positions, vectorised over positions.

    A joint's frame in its parent's is F (I + sin q K + (1 - cos q) K^2): three constant matrices of
    each joint, times 1, sin q and cos q. Ends of capsules are linear in the frames: one product.
    """

    def __init__(self, model: Model) -> None:
        n = len(model.joints)
        self.parents = [joint.parent for joint in model.joints]
        self._still, self._sin, self._cos, self._slide = (np.zeros((n, 1, 4, 4)) for _ in range(4))
        for i, joint in enumerate(model.joints):
            self._joint(i, joint)
        self.sliding = bool(self._slide.any())
        self.bodies = [b for b, body in enumerate(model.bodies) for _ in body.capsules]
        capsules = [each for body in model.bodies for each in body.capsules]
        self.moving = np.array([model.bodies[b].joint >= 0 for b in self.bodies], bool)
        self.radius = np.array([each.radius for each in capsules])
        starts = np.array([each.start for each in capsules]).reshape(-1, 3)
        ends = np.array([each.end for each in capsules]).reshape(-1, 3)
        self.squares = ((ends - starts) ** 2).sum(1)
        """Squared lengths [C] of the capsules' axes, m^2."""
        self._spread = self._ends([model.bodies[b].joint for b in self.bodies], starts, ends, n)
        self._frames: dict[int, Floats] = {}
        self._newest: tuple[Floats, Floats] | None = None
        self._newest_ends: Floats | None = None

    def _joint(self, i: int, joint: Joint) -> None:
        axis = np.asarray(joint.axis) / np.linalg.norm(joint.axis)
        frame = np.asarray(joint.turn).reshape(3, 3)
        cross = np.cross(np.eye(3), axis)
        self._still[i, 0, :3, 3], self._still[i, 0, 3, 3] = joint.place, 1.0
        self._still[i, 0, :3, :3] = frame
        if joint.slides:
            self._slide[i, 0, :3, 3] = frame @ axis
        else:
            self._still[i, 0, :3, :3] = frame @ (np.eye(3) + cross @ cross)
            self._sin[i, 0, :3, :3] = frame @ cross
            self._cos[i, 0, :3, :3] = -frame @ cross @ cross

    def _ends(self, joints: list[int], starts: Floats, ends: Floats, n: int) -> Floats:
        """[(n + 1) 12, 2 C 3]: takes the frames (the base's first), flat, to starts and ways."""
        spread = np.zeros((n + 1, 3, 4, 2, len(joints), 3))
        for c, joint in enumerate(joints):
            for i in range(3):
                spread[joint + 1, i, :3, 0, c, i] = starts[c]
                spread[joint + 1, i, 3, 0, c, i] = 1.0
                spread[joint + 1, i, :3, 1, c, i] = ends[c] - starts[c]
        return np.ascontiguousarray(spread.reshape((n + 1) * 12, -1))

    def __call__(self, q: Floats) -> Floats:
        """Starts of all capsules and their ways to the ends [k, 2, C, 3] (m, base frame) at `q`
        [k, n]; not to be changed."""
        frames = self.frames(q)
        if self._newest_ends is None:
            flat = frames[:, :, :3].transpose(1, 0, 2, 3).reshape(len(q), -1)
            self._newest_ends = (flat @ self._spread).reshape(len(q), 2, -1, 3)
        return self._newest_ends

    def frames(self, q: Floats) -> Floats:
        """Frames [n + 1, k, 4, 4] of the base and of all joints in the base frame, at `q` [k, n];
        valid until the next call. The newest are kept for the tool and the capsules."""
        if self._newest is not None and np.array_equal(self._newest[0], q):
            return self._newest[1]
        k, n = q.shape
        if k not in self._frames:
            self._frames[k] = np.tile(np.eye(4), (n + 1, k, 1, 1))
        frames, turned = self._frames[k], q.T[:, :, None, None]
        local = np.sin(turned) * self._sin
        local += np.cos(turned) * self._cos
        local += self._still
        if self.sliding:
            local += turned * self._slide
        for i, parent in enumerate(self.parents):
            np.matmul(frames[parent + 1], local[i], out=frames[i + 1])
        self._newest = q.copy(), frames
        self._newest_ends = None
        return frames

    def point(self, forward: Callable[[Floats], Floats]) -> Callable[[Floats], Floats] | None:
        """The function `forward` (positions [k, 3] at `q` [k, n]) by these frames; None where that
        is no point of any joint's frame (to 10 um)."""
        q = np.random.default_rng(0).uniform(-1, 1, (16, len(self.parents)))
        places = forward(q)
        for at, frames in reversed(list(enumerate(self.frames(q)))):
            inside = np.einsum("kji,kj->ki", frames[:, :3, :3], places - frames[:, :3, 3])
            point = np.append(inside.mean(0), 1.0)
            if np.abs(inside - point[:3]).max() <= 1e-5:
                return lambda q: self.frames(q)[at, :, :3] @ point
        return None


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
        self._planes = np.zeros((0, 4))  # planes [p, 4]: unit normals and offsets (m)
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
