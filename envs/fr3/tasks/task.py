"""Task: base class of the FR3 tasks: objects, initial states, success and reward terms.

The arithmetic of a task uses the `namespace` of its inputs, so the same module runs on numpy arrays
(MuJoCo on the CPU) and torch tensors (MuJoCo Warp on the GPU).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mujoco

from embodied.embodiments.arrays import Floats, constant, namespace
from embodied.envs.mujoco.cameras import Point

Flags = Any
"""bool [n], of the same library as Floats."""
Params = Mapping[str, Floats]
STIFF = (0.005, 1.0)
"""Contact time constant (s) of what is held: soft objects sink into the pads."""
Rgba = tuple[float, float, float, float]


@dataclass(frozen=True)
class Parameter:
    """One element of the task vector: its range and unit."""

    name: str
    low: float
    high: float
    unit: str = "m"


@dataclass(slots=True)
class View:
    """Inputs of rewards and observations for n envs, SI units, base frame.

    `tool` [n, 3] measured tool point, `lead` [n, 3] commanded minus measured tool point (it grows
    with the contact force), `width` [n] gripper opening, `place` and `turn` positions [n, 3] and
    quaternions [n, 4] (w first) by body name, `param` the task parameters [n] by name, `memory` the
    values that the task drew at the start of the episode, `joint` the joints of objects [n] by name
    (drawers, buttons; m).
    """

    q: Floats
    dq: Floats
    tool: Floats
    lead: Floats
    width: Floats
    place: dict[str, Floats]
    turn: dict[str, Floats]
    param: Params
    memory: dict[str, Floats]
    joint: dict[str, Floats] = field(default_factory=dict)


@dataclass(slots=True)
class Start:
    """Initial states of n episodes: tool point [n, 3], gripper width [n], positions and quaternions
    of free bodies, positions of marker (mocap) bodies, and the task's memory [n, ...].
    """

    tool: Floats
    width: Floats
    free: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    marker: dict[str, Floats] = field(default_factory=dict)
    memory: dict[str, Floats] = field(default_factory=dict)
    held: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    """Bodies that begin in the hand: position relative to the tool point, quaternion."""

    def bodies(self, tool: Floats) -> dict[str, tuple[Floats, Floats]]:
        """Positions [n, 3] and quaternions [n, 4] of all free bodies; `tool` [n, 3] is where the
        tool point came to be."""
        held = {name: (tool + offset, turn) for name, (offset, turn) in self.held.items()}
        return {**self.free, **held}


Term = Callable[[View], Floats]


class Task(ABC):
    """Base class of a task on the table, used by `embodied.envs.fr3.env.Fr3`.

    `free` and `markers` name the bodies that `edit` adds, `touch` its touch sensors (N), whose sum
    is the contact force of the arm; `names` are the elements of `observe`;
    `terms` are pure functions of a `View`, weighted by `weights` in the shaped reward.
    """

    text: str
    parameters: tuple[Parameter, ...]
    free: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    touch: tuple[str, ...] = ()
    names: tuple[str, ...]
    terms: ClassVar[Mapping[str, Term]]
    weights: ClassVar[Mapping[str, float]]
    draws: int = 3
    timestep: float = 0.0025
    front: tuple[Point, Point, float] = ((1.50, -0.80, 0.85), (0.36, 0.0, 0.24), 40.0)
    """The front camera: where it is, what it looks at (m), its vertical field of view (degrees)."""
    horizon: int = 80
    close: float = 0.0
    """Distance (m) within which a point is at its goal (0: the goal is no point)."""
    settle: int = 0
    """Physics steps taken before the episode begins (a grasp that has to build up)."""

    @abstractmethod
    def edit(self, spec: mujoco.MjSpec) -> None:
        """Add the task's bodies to the scene."""

    @abstractmethod
    def start(self, param: Params, draws: Floats) -> Start:
        """Initial states of n episodes from task parameters [n] and uniform numbers [n, draws]."""

    @abstractmethod
    def observe(self, view: View) -> Floats:
        """The task's part of the state observation, [n, len(names)]."""

    @abstractmethod
    def success(self, view: View) -> Flags:
        """[n]: whether each env has succeeded."""

    def lost(self, view: View) -> Flags:
        """[n]: whether each env has failed for good, which ends the episode; default: never."""
        return namespace(view.width).zeros_like(view.width) > 0

    @abstractmethod
    def describe(self, view: View) -> str:
        """Text description of the first env in `view`."""

    def shape(self, param: Params) -> dict[tuple[str, str], Floats]:
        """Model fields that follow from the parameters: (geom field, geom name) to values
        [n, ...]; sizes may only shrink against the compiled model."""
        return {}


def upright(yaw: Floats) -> Floats:
    """Quaternions [n, 4] of turns about the vertical by `yaw` [n] (rad)."""
    xp = namespace(yaw)
    zero = xp.zeros_like(yaw)
    return xp.stack([xp.cos(yaw / 2), zero, zero, xp.sin(yaw / 2)], 1)


def yaw_of(turn: Floats) -> Floats:
    """Heading [n] (rad) of quaternions [n, 4]."""
    w, x, y, z = turn.T
    return namespace(turn).arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))


def axis_of(turn: Floats) -> Floats:
    """The body's z axis [n, 3] for quaternions [n, 4]."""
    w, x, y, z = turn.T
    return namespace(turn).stack(
        [2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], 1
    )


def spread(draws: Floats, low: tuple[float, ...], high: tuple[float, ...]) -> Floats:
    """Uniform numbers [n, k] stretched to a box."""
    bottom = constant(low, draws)
    return bottom + draws * (constant(high, draws) - bottom)


def sliding(friction: Floats) -> Floats:
    """Friction of a geom [n, 3] from its sliding part [n]; torsion and rolling are those of
    `add_box`."""
    like = namespace(friction).full_like
    return namespace(friction).stack([friction, like(friction, 0.01), like(friction, 0.001)], 1)


def near(a: Floats, b: Floats, scale: float) -> Floats:
    """1 where the points [n, 3] meet, falling with distance: 1 - tanh(distance / scale)."""
    return 1 - namespace(a).tanh(distance(a, b) / scale)


def distance(a: Floats, b: Floats) -> Floats:
    """The distance [n] (m) between points [n, 3]."""
    return namespace(a).linalg.norm(a - b, axis=1)


def centimetres(place: Floats) -> str:
    """The first of the points [n, 3] in words."""
    x, y, z = 100 * place[0]
    return f"x {x:.1f}, y {y:.1f}, z {z:.1f} cm"


def add_box(
    spec: mujoco.MjSpec, name: str, half: tuple[float, float, float], rgba: Rgba, mass: float
) -> mujoco.MjsBody:
    """A free box with its own friction."""
    body = add_free(spec, name)
    add_solid(body, mujoco.mjtGeom.mjGEOM_BOX, half, (0.0, 0.0, 0.0), rgba, mass, name=name)
    return body


def add_free(spec: mujoco.MjSpec, name: str) -> mujoco.MjsBody:
    """A body that moves freely, without solids yet."""
    body = spec.worldbody.add_body(name=name)
    body.add_freejoint(name=name)
    return body


def add_solid(
    body: mujoco.MjsBody,
    kind: mujoco.mjtGeom,
    size: tuple[float, float, float],
    place: tuple[float, float, float],
    rgba: Rgba,
    mass: float = 0.0,
    friction: float = 1.0,
    name: str = "",
) -> mujoco.MjsGeom:
    """A solid with its own friction (priority over the table and the pads)."""
    return body.add_geom(
        name=name,
        type=kind,
        size=size,
        pos=place,
        rgba=rgba,
        mass=mass,
        condim=4,
        priority=1,
        friction=[friction, 0.01, 0.001],
        solref=STIFF,
    )


def add_marker(spec: mujoco.MjSpec, name: str, radius: float, rgba: Rgba) -> None:
    """A ball that shows a goal and touches nothing."""
    _shown(spec, name, mujoco.mjtGeom.mjGEOM_SPHERE, [radius, 0, 0], 0.0, rgba)


def add_disc(spec: mujoco.MjSpec, name: str, radius: float, rgba: Rgba) -> None:
    """A flat disc, drawn 2.4 cm below its body, on the table under an object's centre."""
    _shown(spec, name, mujoco.mjtGeom.mjGEOM_CYLINDER, [radius, 0.0006, 0], -0.0244, rgba)


def _shown(
    spec: mujoco.MjSpec,
    name: str,
    kind: mujoco.mjtGeom,
    size: list[float],
    below: float,
    rgba: Rgba,
) -> None:
    spec.worldbody.add_body(name=name, mocap=True).add_geom(
        name=name, type=kind, size=size, pos=[0, 0, below], rgba=rgba, contype=0, conaffinity=0
    )
