"""The shape of an arm as capsules: what a model file holds, and where its capsules are at joint
positions.

A capsule is a segment with a radius. Each belongs to a body, each body moves with one joint of the
arm or stays with its base. Model files are YAML: arm files of `embodied robot describe`, and for
arms of this repository `embodied/embodiments/*_capsules.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import yaml

from embodied.core.bounds import Bound, Number
from embodied.core.build import ConfigError, parse
from embodied.embodiments.kinematics.arm import ArmsFile, Placed, read_arms_file
from embodied.embodiments.kinematics.chain import Joint
from embodied.real_robot.kernel.arm_state import Floats

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
        """[(n + 1) 12, 2 C 3]: takes the frames (the base's first), flat, to all starts, and then
        to all ways from start to end."""
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
        """Frames [n + 1, k, 4, 4] of the base and of all joints in the base frame, at `q` [k,
        n]; valid until the next call. The newest are kept: the tool and the capsules are asked for
        at the same positions."""
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
        """The same function as `forward`, of positions [k, 3] (m) at `q` [k, n], from these frames;
        None where that is no point of any joint's frame (to 10 um)."""
        q = np.random.default_rng(0).uniform(-1, 1, (16, len(self.parents)))
        places = forward(q)
        for at, frames in reversed(list(enumerate(self.frames(q)))):
            inside = np.einsum("kji,kj->ki", frames[:, :3, :3], places - frames[:, :3, 3])
            point = np.append(inside.mean(0), 1.0)
            if np.abs(inside - point[:3]).max() <= 1e-5:
                return lambda q: self.frames(q)[at, :, :3] @ point
        return None
