"""Fr3: tabletop tasks of the Franka FR3 in batched MuJoCo, with the controller of the real arm.

Domain randomization (Tobin et al., 2017; Peng et al., 2018): each physical or visual quantity is
one more element of the task vector, drawn from the env's own generator at the start of an episode.
The fields are those of MjSpec and MjModel, relative to the compiled values:

    geom_friction * friction,  body_mass, body_inertia * mass,  actuator stiffness * gain,
    actuator damping * damping,  dof_damping of the fingers * hand,
    light_diffuse * light,  cam_pos + camera,  geom_rgba + colour

The gripper closes with speed F / damping for force F, so higher damping makes it slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, Ranges
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.env import GoalSpace
from embodied.core.spec import Leaf, Spec
from embodied.embodiments import cartesian_delta, fr3
from embodied.embodiments.cartesian_delta import CartesianDelta
from embodied.embodiments.controller import Controller
from embodied.embodiments.named_controllers import controller_node
from embodied.envs.fr3.base import (
    DT,
    ROBOT_NAMES,
    JointValues,
    RenderScene,
    TaskInstance,
    addresses,
    compile_scene,
    mocaps,
    stand,
    view_of,
    without_objects,
    write_joints,
)
from embodied.envs.fr3.task_env import TaskEnv
from embodied.envs.fr3.tasks.goal import SIDE
from embodied.envs.fr3.tasks.task import Parameter, Task, View
from embodied.envs.maze.levels import MazeLevels
from embodied.envs.mujoco.batch_env import Floats, Rows
from embodied.envs.mujoco.cameras import Cameras
from embodied.envs.point_goals import PointGoals
from embodied.envs.wrappers import point_cloud

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
        for name, value in self.before.items():
            batch.expand(name)[rows] = value

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


VIEWS = ("front", "wrist")


@dataclass(frozen=True)
class Config:
    """Settings of an FR3 environment.

    `drawing` "light" renders boxes instead of meshes and no arm, which is ten times as fast
    without a GPU. With `objects` "privileged", `state` has the robot's own values only and
    `privileged/state` has everything, for critics and demonstrators. `randomize` gives quantities
    of `embodied.envs.fr3.env` a range to be sampled from in each episode, as
    further task parameters. `arm` sets joint parameters (`embodied.envs.fr3.base`), as
    identified from a real arm. `controller` is cartesian_delta (with `turning`), cartesian_pose,
    joint_position, or a node with a `_target_`.
    """

    task: str = "lift"  # which task of `embodied.envs.fr3.tasks`
    num_envs: Count = 16  # parallel environments
    reward: Literal["sparse", "shaped"] = "sparse"  # kind of the reward
    cameras: tuple[str, ...] = ()  # cameras whose images are observations: front, wrist
    portraits: tuple[str, ...] = ()  # images for rewards, side by side (empty: the first camera)
    image_size: Count = 96  # pixels of an image's side
    drawing: Literal["full", "light"] = "full"  # how the scene is rendered
    clouds: point_cloud.Config | None = None  # adds the point cloud `points` (null: none)
    horizon: Count | None = None  # control steps of an episode, 20 Hz (null: the task's own)
    threads: Count = 2  # CPU threads
    seed: CountOrZero = 0  # of the random numbers
    turning: Literal["none", "yaw", "full"] = "none"  # rotations of the hand that an action has
    ranges: Ranges = field(default_factory=dict)  # ranges of task parameters, by name
    objects: Literal["seen", "privileged"] = "seen"  # who sees objects
    randomize: Ranges = field(default_factory=dict)  # ranges of physical quantities, by name
    reveal: bool = False  # observe the sampled quantities in [0, 1] as privileged/random
    arm: Mapping[str, JointValues] = field(default_factory=dict)  # joint parameters by name
    controller: str | Node = "cartesian_delta"  # what actions mean


class Fr3(TaskEnv):
    """B parallel FR3 robots with one of the tasks of `embodied.envs.fr3.tasks`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.portraits = tuple(config.portraits)
        if unknown := [name for name in self.portraits if name not in VIEWS]:
            raise ConfigError(
                f"env.portraits: unknown camera {unknown[0]!r}{nearest(unknown[0], VIEWS)}"
            )
        more = drawn_from(config.randomize)
        self.given = self.instance(more)
        self.what = self.given.task
        self.parameters = self.given.parameters
        node = controller_node(config.controller, "fr3", DT)
        if config.turning != "none":
            if config.controller != "cartesian_delta":
                raise ConfigError(
                    f"env.turning={config.turning} goes with controller=cartesian_delta"
                )
            node["turning"] = config.turning
        self.controller = build(node, Controller)
        self._start = CartesianDelta(cartesian_delta.Config())
        self.draws = self.what.draws
        model = compile_scene(self.what, pictures=False)
        write_joints(model, config.arm)
        super().__init__(
            model,
            self._spec(tuple(each.name for each in more)),
            config.num_envs,
            substeps=round(DT / self.what.timestep),
            horizon=self.what.horizon if config.horizon is None else config.horizon,
            threads=config.threads,
            seed=config.seed,
            name=f"fr3_{config.task}",
            cameras=_cameras(config),
        )
        self._free = addresses(model, self.what)
        self._markers = mocaps(model, self.what)
        self._drawn = RenderScene(self.what)
        self._seen = (
            self._drawn if config.drawing == "full" else RenderScene(self.what, meshes=False)
        )
        self._looks: dict[RenderScene, Look] = {}
        self._physics = Physics(config.randomize, model, self.what)
        # Allocate the per-row memory: the controller's reference and what the task draws.
        half = self.given.native(np.full((1, self.task.shape[1]), 0.5))
        own = self.what.start(half, np.full((1, self.draws), 0.5)).memory
        reference = self.controller.begin(fr3.HOME[None], np.zeros(1))
        self._own = tuple(own)
        self._reference = tuple(reference)
        for key, value in {**reference, **own}.items():
            self.memory[key] = np.zeros((config.num_envs, *value.shape[1:]))

    def instance(self, more: tuple[Parameter, ...]) -> TaskInstance:
        """The task with its settings; `more` are its further task parameters."""
        config = self.config
        return TaskInstance(config.task, config.reward, config.ranges, more)

    def control(self, action: Floats) -> None:
        memory = self.memory
        reference = {key: memory[key] for key in self._reference}
        joints, width, moved = self.controller(action, self.batch.qpos[:, :7], reference)
        for key, value in moved.items():
            memory[key][:] = value
        self.batch.ctrl[:, :7] = joints
        self.batch.ctrl[:, 7] = width / 2

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        state = self.given.observe(self.view(rows)).astype(np.float32)
        obs: dict[str, NDArray[np.generic]] = {"state": state}
        if self.config.objects == "privileged":
            obs = {"state": state[:, : len(ROBOT_NAMES)].copy(), "privileged/state": state}
        if "privileged/random" in self.spec.obs:
            size = self.spec.obs["privileged/random"].size
            obs["privileged/random"] = self.task[rows, -size:].astype(np.float32)
        return obs

    def place(self, rows: Rows, draws: Floats) -> None:
        start = self.what.start(self.native(rows), draws)
        q = self._start.reach(start.tool)
        qpos = self.batch.qpos[rows]
        stand(qpos, q, start, self._free)
        self.batch.qpos[rows] = qpos
        for name, place in start.marker.items():
            self.batch.mocap_pos[rows, self._markers[name]] = place
        for key, value in {**self.controller.begin(q, start.width), **start.memory}.items():
            self.memory[key][rows] = value
        self.batch.ctrl[rows, :7] = q
        self.batch.ctrl[rows, 7] = 0.0
        self.batch.ctrl[rows, 7] = start.width / 2
        if self.what.settle:
            self.batch.ctrl[rows, 7] = 0.0
            self.memory["width"][rows] = 0.0
            self.batch.step(rows, nstep=self.what.settle)

    def retask(self, rows: Rows) -> None:
        native = self.native(rows)
        self._physics.restore(self.batch, rows)
        for (name, geom), value in self.what.shape(native).items():
            self.batch.expand(name)[rows, self.model.geom(geom).id] = value
        self._physics.scale(self.batch, rows, native)

    def view(self, rows: Rows) -> View:
        """The `View` of `rows` for rewards, observations and descriptions."""
        return view_of(
            self.batch.qpos[rows],
            self.batch.qvel[rows],
            self.batch.mocap_pos[rows],
            self._free,
            self._markers,
            self.memory["place"][rows],
            self.native(rows),
            {key: self.memory[key][rows] for key in self._own},
        )

    def scene(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        return self._scene(row, self._drawn)

    def sight(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        return self._scene(row, self._seen)

    def _scene(self, row: int, drawn: RenderScene) -> tuple[mujoco.MjModel, mujoco.MjData]:
        native = self.native(np.array([row]))
        model, data = drawn.shaped(native)
        if self.config.randomize:
            if drawn not in self._looks:
                self._looks[drawn] = Look(self.config.randomize, model, self.what)
            self._looks[drawn].write(model, native)
        everything = mujoco.mjtState.mjSTATE_INTEGRATION.value
        mujoco.mj_setState(model, data, self.batch.state[row], everything)
        mujoco.mj_forward(model, data)
        return model, data

    def goal_space(self) -> GoalSpace:
        """Of the tasks whose `close` is a distance: reach, channel, course, push."""
        shaped = self.config.reward == "shaped"
        return PointGoals(self.spec.obs["state"], self.what.close, shaped, self.name)

    def _spec(self, drawn: tuple[str, ...]) -> Spec:
        spec = self.given.spec(self.controller)
        if self.config.objects == "privileged":
            spec = without_objects(spec, ROBOT_NAMES)
        if self.config.reveal and drawn:
            leaf = Leaf((len(drawn),), low=0.0, high=1.0, names=drawn)
            spec = spec.with_obs(**{"privileged/random": leaf})
        return spec


def _cameras(config: Config) -> Cameras | None:
    names = tuple(config.cameras)
    if config.clouds is not None:
        return point_cloud.Clouds(names, config.image_size, config.clouds)
    return Cameras(names, config.image_size) if names else None


@dataclass(frozen=True)
class CourseConfig(Config):
    """Settings as in `embodied.envs.fr3.env.Config`, for the task course."""

    task: str = "course"  # course, no other
    blocks: Count = 12  # most boxes in a sampled level


class Fr3Course(Fr3):
    """Levels as in `embodied.envs.maze.env`, always with a path from start to goal; `held_out` are
    for evaluation. Rising above the boxes ends an episode without success.
    """

    def __init__(self, config: CourseConfig) -> None:
        if config.task != "course" or config.ranges or config.randomize:
            raise ConfigError(
                "Fr3Course: task must be course; ranges and randomize are not supported"
            )
        self.levels = MazeLevels(SIDE, config.blocks)
        self.held_out = torch.from_numpy(self.levels.held_out).float()
        super().__init__(config)
        assert self.spec.task is not None and self.spec.task.names == self.levels.names
        self.spec = replace(self.spec, task=replace(self.spec.task, unit="level"))

    def _begin(self, rows: Rows, task: Floats | None) -> None:
        if task is None:
            task = self.task.copy()
            for row in rows:
                task[row] = self.levels.random(1, self.generators[row])[0]
        super()._begin(rows, task)
