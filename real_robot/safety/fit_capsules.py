"""Fits capsules to the arm in a MuJoCo model.

Each body is cut, across one axis, into at most three slices where that saves volume, and every
slice gets the smallest capsule that a seeded search finds around it: around all vertices of its
meshes and the corners of its other shapes, so that their surfaces are inside. Joints beyond the
arm's (fingers) are swept through their range: their bodies are fitted in all positions at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from embodied.core.build import ConfigError
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.safety.geometry import (
    Body,
    Capsule,
    Joint,
    Kinematics,
    Model,
    SelfDistances,
)

SLICES = 3
WORTH = 0.85  # of the volume: what another slice has to come down to
ROUNDS, TRIES = 60, 32


def fit_body(triangles: Floats) -> list[Capsule]:
    """Small capsules that hold all of `triangles` [m, 3, 3]."""
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
    """Points [m, 3] whose hull holds the triangles between two cuts each."""
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
    """A small capsule around `points` [m, 3], by a seeded search."""
    ways = np.random.default_rng(1).normal(0, 1, (400, 3))
    outer = points[np.unique(np.argmax(points @ ways.T, axis=0))]  # the furthest in many directions
    random = np.random.default_rng(0)
    tried = [_search(outer, axis, random, rounds) for axis in _main_axes(outer)]
    start, end, _ = min(tried, key=lambda made: float(_volume(*made)))
    way = end - start
    share = np.clip((points - start) @ way / max(float(way @ way), 1e-12), 0, 1)
    radius = float(np.linalg.norm(points - start - share[:, None] * way, axis=1).max())
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
    return tuple(round(float(v), 6) + 0.0 for v in values)


NEAR = 0.03  # m: bodies that never come that near are no pair
OFTEN, CLOSE = 0.3, 0.01  # share of poses with capsules that near (m): too coarse to tell
TURNED = 32  # sides of the prism around a cylinder
CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)
BOX_FACES = [[0, 1, 2], [1, 2, 3], [4, 5, 6], [5, 6, 7], [0, 1, 4], [1, 4, 5], [2, 3, 6],
             [3, 6, 7], [0, 2, 4], [2, 4, 6], [1, 3, 5], [3, 5, 7]]  # fmt: skip


class Arm:
    """Which of a MuJoCo model's bodies move with which joint of the arm, and their surfaces."""

    def __init__(self, mj: Any, joints: int | Sequence[int] | None = None, base: int = 0) -> None:
        import mujoco

        self.mujoco: Any = mujoco
        self.mj, self.data = mj, self.mujoco.MjData(mj)
        turning = [j for j in range(mj.njnt) if mj.jnt_type[j] == self.mujoco.mjtJoint.mjJNT_HINGE]
        if isinstance(joints, int):
            self.arm = list(range(joints))
        else:
            self.arm = turning if joints is None else list(joints)
        self.base, self.own = base, _subtree(mj, base, self.arm)
        self.moves_with = [-1] * mj.nbody
        for b in self.own:
            own = [j for j in self.arm if mj.jnt_bodyid[j] == b]
            if len(own) > 1:
                raise ConfigError(f"geometry: body {mj.body(b).name} has more than one joint")
            above = self.moves_with[mj.body_parentid[b]]
            self.moves_with[b] = self.arm.index(own[0]) if own else above

    def place(self, q: Floats, swept: float = 0.0) -> None:
        """The arm at `q` [n], its other joints at that share of their range."""
        for j in range(self.mj.njnt):
            low, high = self.mj.jnt_range[j]
            self.data.qpos[self.mj.jnt_qposadr[j]] = low + swept * (high - low)
        for each, j in zip(q, self.arm, strict=True):
            self.data.qpos[self.mj.jnt_qposadr[j]] = each
        self.mujoco.mj_kinematics(self.mj, self.data)

    def frame(self, joint: int) -> tuple[Floats, Floats]:
        """Rotation and place of that joint's frame, in the base frame; now."""
        if joint < 0:
            return self.data.xmat[self.base].reshape(3, 3).copy(), self.data.xpos[self.base].copy()
        b = self.mj.jnt_bodyid[self.arm[joint]]
        turn = self.data.xmat[b].reshape(3, 3).copy()
        return turn, self.data.xpos[b] + turn @ self.mj.jnt_pos[self.arm[joint]]

    def joints(self) -> Iterator[Joint]:
        self.place(np.zeros(len(self.arm)))
        for i, j in enumerate(self.arm):
            parent = self.moves_with[self.mj.body_parentid[self.mj.jnt_bodyid[j]]]
            (base, origin), (turn, place) = self.frame(parent), self.frame(i)
            yield Joint(
                self.mj.joint(j).name or f"joint{i}",
                parent,
                point(base.T @ (place - origin)),
                tuple(rounded((base.T @ turn).ravel())),
                point(self.mj.jnt_axis[j]),
                bool(self.mj.jnt_type[j] == self.mujoco.mjtJoint.mjJNT_SLIDE),
            )

    def surfaces(self) -> dict[int, Floats]:
        """Triangles [m, 3, 3] of each body with a shape, in the frame of what it moves with."""
        found: dict[int, list[Floats]] = {}
        swept = (0.0,) if len(self.arm) == self.mj.njnt else (0.0, 0.5, 1.0)
        for g in range(self.mj.ngeom):
            b = int(self.mj.geom_bodyid[g])
            if b in self.own and self._solid(g):
                places = [self._surface(g, self.moves_with[b], share) for share in swept]
                found.setdefault(b, []).extend(places)
                for one, two in pairwise(places):  # the ways of all corners, as flat triangles
                    a, c = one.reshape(-1, 3), two.reshape(-1, 3)
                    moved = np.abs(c - a).max(1) > 1e-9
                    found[b].append(np.stack([a[moved], c[moved], c[moved]], 1))
        return {b: np.concatenate(parts) for b, parts in found.items()}

    def _solid(self, g: int) -> bool:
        """Whether geom `g` is a shape that collides, not one for the eye only."""
        plane = self.mj.geom_type[g] == int(self.mujoco.mjtGeom.mjGEOM_PLANE)
        return not plane and bool(self.mj.geom_contype[g] or self.mj.geom_conaffinity[g])

    def _surface(self, g: int, joint: int, share: float) -> Floats:
        self.place(np.zeros(len(self.arm)), share)
        turn, place = self.frame(joint)
        points = shape(self.mj, g) @ self.data.geom_xmat[g].reshape(3, 3).T + self.data.geom_xpos[g]
        return (points - place) @ turn

    def rods(self, b: int) -> list[Capsule]:
        """The shapes of a body that has capsules only and no joint beyond the arm's; else none."""
        geoms = [g for g in range(self.mj.ngeom) if self.mj.geom_bodyid[g] == b and self._solid(g)]
        others = self.mj.body_jntnum[b] > 0 and self.mj.body_jntadr[b] not in self.arm
        kind = int(self.mujoco.mjtGeom.mjGEOM_CAPSULE)
        if others or any(self.mj.geom_type[g] != kind for g in geoms):
            return []
        self.place(np.zeros(len(self.arm)))
        turn, place = self.frame(self.moves_with[b])
        found: list[Capsule] = []
        for g in geoms:
            way = self.data.geom_xmat[g].reshape(3, 3)[:, 2] * self.mj.geom_size[g, 1]
            ends = [(self.data.geom_xpos[g] + sign * way - place) @ turn for sign in (-1, 1)]
            found.append(Capsule(point(ends[0]), point(ends[1]), float(self.mj.geom_size[g, 0])))
        return found

    def near_pairs(self, model: Model, poses: int) -> Iterator[tuple[str, str]]:
        """Bodies that are not joined and whose shapes come near each other in some poses. Not those
        whose capsules are near in many poses: neighbours but one, which joint limits keep apart."""
        geoms = {
            b: [g for g in range(self.mj.ngeom) if self.mj.geom_bodyid[g] == b and self._solid(g)]
            for b in self.own
        }
        names = {self.mj.body(b).name or f"body{b}": b for b in geoms if geoms[b]}
        random = np.random.default_rng(0)
        low, high = (self.mj.jnt_range[self.arm, side] for side in (0, 1))
        unlimited = ~self.mj.jnt_limited[self.arm].astype(bool)
        low, high = np.where(unlimited, -np.pi, low), np.where(unlimited, np.pi, high)
        tried = random.uniform(low, high, (poses, len(self.arm)))
        ends = Kinematics(model)(tried)
        for one, two in combinations(model.names, 2):
            a, b = names[one], names[two]
            if self._joined(a, b) or _share_near(model, one, two, ends) > OFTEN:
                continue
            if self._comes_near(geoms[a], geoms[b], tried):
                yield one, two

    def _joined(self, a: int, b: int) -> bool:
        i, j = sorted((self.moves_with[a], self.moves_with[b]))
        if i == j:
            return True
        return self.moves_with[self.mj.body_parentid[self.mj.jnt_bodyid[self.arm[j]]]] == i

    def _comes_near(self, one: list[int], two: list[int], poses: Floats) -> bool:
        for q in poses:
            self.place(q)
            for g in one:
                for h in two:
                    if self.mujoco.mj_geomDistance(self.mj, self.data, g, h, NEAR, None) < NEAR:
                        return True
        return False


def _subtree(mj: Any, base: int, joints: Sequence[int]) -> list[int]:
    """The bodies of the arm, in order: all below `base`, and itself; all of the world for a base of
    0, but no other arm that stands there."""
    found = [base] if base else []
    roots = {_root(mj, int(mj.jnt_bodyid[j])) for j in joints}
    for b in range(1, mj.nbody):
        above = int(mj.body_parentid[b])
        other = not base and above == 0 and mj.body_weldid[b] and b not in roots
        if b != base and not other and (above in found or (above == 0 and not base)):
            found.append(b)
    return sorted(found)


def _root(mj: Any, body: int) -> int:
    while mj.body_parentid[body]:
        body = int(mj.body_parentid[body])
    return body


def _share_near(model: Model, one: str, two: str, ends: Floats) -> float:
    """The share of poses in which two bodies' capsules are CLOSE."""
    names = [body.name for body in model.bodies for _ in body.capsules]
    pairs = [
        (i, j)
        for i, first in enumerate(names)
        for j, second in enumerate(names)
        if (first, second) == (one, two)
    ]
    apart = SelfDistances(Kinematics(model), pairs)(ends).min(1)
    return float((apart < CLOSE).mean())


def shape(mj: Any, g: int) -> Floats:
    """Triangles [m, 3, 3] around geom `g`, in its own frame; their hull holds its surface."""
    import mujoco

    kinds: Any = mujoco.mjtGeom
    kind, size = kinds(int(mj.geom_type[g])), mj.geom_size[g]
    if kind == kinds.mjGEOM_MESH:
        d = mj.geom_dataid[g]
        first, count = mj.mesh_vertadr[d], mj.mesh_vertnum[d]
        vertices = mj.mesh_vert[first : first + count].astype(float)
        first, count = mj.mesh_faceadr[d], mj.mesh_facenum[d]
        return vertices[mj.mesh_face[first : first + count]]
    if kind in (kinds.mjGEOM_BOX, kinds.mjGEOM_ELLIPSOID):
        return (CORNERS * size)[BOX_FACES]
    if kind == kinds.mjGEOM_SPHERE:
        return _round_rod(size[0], 0.0, size[0])
    if kind == kinds.mjGEOM_CAPSULE:
        return _round_rod(size[0], size[1], size[0])
    if kind == kinds.mjGEOM_CYLINDER:
        return _round_rod(size[0], size[1], 0.0)
    raise ConfigError(f"geometry: geom {g} has a shape that cannot be fitted")


def _round_rod(radius: float, half: float, cap: float) -> Floats:
    """Triangles of a rod along z, its ends rounded over `cap` (as circumscribed polygons)."""
    wide = radius / np.cos(np.pi / TURNED)
    around = np.arange(TURNED) * 2 * np.pi / TURNED
    ring = wide * np.stack([np.cos(around), np.sin(around), 0 * around], 1)
    levels = [(-half, 1.0), (half, 1.0)]
    if cap:  # a round end as rings that lie on or outside of it
        rise = np.linspace(0, np.pi / 2, 9)
        more = [(half + cap * np.sin(a), np.cos(a)) for a in rise[1:]]
        levels = [*((-z, w) for z, w in reversed(more)), *levels, *more]
    rings = np.stack([ring * [w, w, 1.0] + [0, 0, z] for z, w in levels])
    one, two = rings[:-1], rings[1:]
    quads = (one, two, np.roll(one, -1, 1)), (two, np.roll(one, -1, 1), np.roll(two, -1, 1))
    return np.concatenate([np.stack(each, 2).reshape(-1, 3, 3) for each in quads])


POSES = 3000  # random ones, to find pairs that come near each other


def fit_model(
    mj: Any, joints: int | Sequence[int] | None = None, base: int = 0, poses: int = POSES
) -> Model:
    """`mj`: a compiled MuJoCo model. The first `joints` joints, or those with these numbers, are
    the arm's (None: all that turn), which stands on body `base` (0: the world). `poses`: how many
    random ones are looked at to find pairs that come near each other. ConfigError where there is no
    shape that collides."""
    arm = Arm(mj, joints, base)
    bodies = [
        Body(
            mj.body(b).name or f"body{b}",
            arm.moves_with[b],
            tuple(arm.rods(b) or fit_body(triangles)),
        )
        for b, triangles in sorted(arm.surfaces().items())
    ]
    if not bodies:
        raise ConfigError(
            "geometry: the file has no collision shapes of the arm (URDF: <collision>, MJCF: geoms "
            "with contype or conaffinity)"
        )
    made = Model(tuple(arm.joints()), tuple(bodies), ())
    return Model(made.joints, made.bodies, tuple(arm.near_pairs(made, poses)))


def shapes(model: Model) -> dict[str, Any]:
    """Bodies with their capsules, and pairs, as YAML has them."""
    bodies = [
        {
            "name": body.name,
            "joint": body.joint,
            "capsules": [
                {"start": list(c.start), "end": list(c.end), "radius": c.radius}
                for c in body.capsules
            ],
        }
        for body in model.bodies
    ]
    return {"bodies": bodies, "pairs": [list(pair) for pair in model.pairs]}
