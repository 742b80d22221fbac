"""Domain randomization of the FR3 environments: physical and visual quantities per episode.

Tobin et al. (2017), Peng et al. (2018). Each quantity is one more element of the task vector: it is
drawn from the env's own generator at the start of an episode, a teacher may set it, and it is saved
with the env. The fields are those of MjSpec and MjModel, relative to the compiled values:

    geom_friction * friction,  body_mass, body_inertia * mass,  actuator stiffness * gain,
    actuator damping * damping,  dof_damping of the fingers * hand,
    light_diffuse * light,  cam_pos + camera,  geom_rgba + colour

The gripper closes with speed F / damping for force F, so higher damping makes it slower.
"""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.core.build import ConfigError, nearest
from embodied.embodiments import fr3
from embodied.envs.fr3.tasks.task import Parameter, Task

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
AXES: dict[str, tuple[tuple[str, ...], str]] = {
    "friction": (("friction",), ""),
    "mass": (("mass",), ""),
    "gain": (("gain",), ""),
    "damping": (("damping",), ""),
    "hand": (("hand",), ""),
    "light": (("light",), ""),
    "camera": (("camera_x", "camera_y", "camera_z"), "m"),
    "camera_turn": (("camera_roll", "camera_pitch", "camera_yaw"), "rad"),
    "colour": (("red", "green", "blue"), ""),
}
"""What can be randomised: the parameters it brings, and their unit. Scales without a unit (colour:
added to the colours of table and objects), places in metres and turns in the camera's own axes."""
FIELDS = {
    "friction": ("geom_friction",),
    "mass": ("body_mass", "body_inertia"),
    "gain": ("actuator_gainprm", "actuator_biasprm"),
    "damping": ("actuator_biasprm",),
    "hand": ("dof_damping",),
}
"""The fields that physics reads; the others are for cameras only."""
Randomize = Mapping[str, tuple[float, float]]


def drawn_from(randomize: Randomize) -> tuple[Parameter, ...]:
    """The task parameters of `randomize` (name to [low, high]); ConfigError names the nearest known
    quantity.
    """
    made = []
    for name, (low, high) in randomize.items():
        if name not in AXES:
            raise ConfigError(f'randomize: unknown quantity "{name}"{nearest(name, AXES)}')
        if low > high:
            raise ConfigError(f"randomize: {name}: [{low}, {high}] must be [low, high]")
        if name in (*FIELDS, "light") and low <= 0:
            raise ConfigError(f"randomize: {name} is a factor and must be above 0, got {low}")
        parts, unit = AXES[name]
        made += [Parameter(part, low, high, unit) for part in parts]
    return tuple(made)


class Physics:
    """Writes physical quantities into the envs of a batch.

    `restore` first, then the task's own fields, then `scale`: so a task's values are scaled too.
    """

    def __init__(self, randomize: Randomize, model: mujoco.MjModel, task: Task) -> None:
        self.names = tuple(name for name in randomize if name in FIELDS)
        fields = {field for name in self.names for field in FIELDS[name]}
        self.before = {field: getattr(model, field).copy() for field in sorted(fields)}
        self.bodies, self.geoms = touchable(model, task)
        self.fingers = np.array([model.joint(name).dofadr[0] for name in fr3.FINGERS], np.intp)

    def restore(self, batch: Batch, rows: Rows) -> None:
        """The compiled values, in `rows` [n]."""
        for field, value in self.before.items():
            batch.expand(field)[rows] = value

    def scale(self, batch: Batch, rows: Rows, param: Mapping[str, Floats]) -> None:
        """Times the parameters [n]; what MuJoCo derives from masses follows."""
        factor = {name: param[name][:, None] for name in self.names}
        if "friction" in factor:
            place = np.ix_(rows, self.geoms)
            batch.expand("geom_friction")[place] *= factor["friction"][..., None]
        if "gain" in factor:
            batch.expand("actuator_gainprm")[rows, :, 0] *= factor["gain"]
            batch.expand("actuator_biasprm")[rows, :, 1] *= factor["gain"]
        if "damping" in factor:
            batch.expand("actuator_biasprm")[rows, :, 2] *= factor["damping"]
        if "hand" in factor:
            batch.expand("dof_damping")[np.ix_(rows, self.fingers)] *= factor["hand"]
        if "mass" in factor:
            place = np.ix_(rows, self.bodies)
            batch.expand("body_mass")[place] *= factor["mass"]
            batch.expand("body_inertia")[place] *= factor["mass"][..., None]
            batch.set_const(rows)


class Look:
    """Writes the visual quantities into the rendered model."""

    def __init__(self, randomize: Randomize, model: mujoco.MjModel, task: Task) -> None:
        self.names = tuple(randomize)
        self.place = model.cam_pos.copy()
        self.turn = model.cam_quat.copy()
        self.light = model.light_diffuse.copy()
        self.rgba = model.geom_rgba.copy()
        head = model.vis.headlight
        self.head = {name: getattr(head, name).copy() for name in ("ambient", "diffuse")}
        _, self.geoms = touchable(model, task)

    def write(self, model: mujoco.MjModel, param: Mapping[str, Floats]) -> None:
        """Apply the visual quantities of one env from its parameters [1]."""
        if "camera" in self.names:
            model.cam_pos[:] = self.place + _first(param, AXES["camera"][0])
        if "camera_turn" in self.names:
            for quat, before in zip(model.cam_quat, self.turn, strict=True):
                # `quat` turned by a rotation vector (rad) in its own axes.
                angles = _first(param, AXES["camera_turn"][0])
                turn = np.empty(4)
                turned = np.empty(4)
                angle = float(np.linalg.norm(angles))
                mujoco.mju_axisAngle2Quat(turn, angles / max(angle, 1e-12), angle)
                mujoco.mju_mulQuat(turned, before, turn)
                quat[:] = turned
        if "light" in self.names:
            factor = float(param["light"][0])
            model.light_diffuse[:] = self.light * factor
            for name, value in self.head.items():
                getattr(model.vis.headlight, name)[:] = value * factor
        if "colour" in self.names:
            colour = self.rgba[self.geoms, :3] + _first(param, AXES["colour"][0])
            model.geom_rgba[self.geoms, :3] = colour.clip(0, 1)


def touchable(model: mujoco.MjModel, task: Task) -> tuple[Rows, Rows]:
    """The bodies that can be moved, and their geoms and the table."""
    bodies = np.array([model.body(name).id for name in task.free], np.intp)
    geoms = np.flatnonzero(np.isin(model.geom_bodyid, bodies))
    return bodies, np.append(geoms, model.geom("table").id)


def _first(param: Mapping[str, Floats], names: tuple[str, ...]) -> Floats:
    return np.array([param[name][0] for name in names])
