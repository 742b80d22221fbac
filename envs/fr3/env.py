"""Fr3: tabletop tasks of the Franka FR3 in batched MuJoCo, with the controller of the real arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.spec import Leaf, Spec
from embodied.embodiments import cartesian_delta, fr3
from embodied.embodiments.cartesian_delta import CartesianDelta
from embodied.embodiments.controller import Controller
from embodied.embodiments.named_controllers import controller_node
from embodied.envs.fr3 import joint_model
from embodied.envs.fr3.base import (
    DT,
    ROBOT_NAMES,
    RenderScene,
    TaskInstance,
    addresses,
    compile_scene,
    mocaps,
)
from embodied.envs.fr3.domain_randomization import Look, Physics, drawn_from
from embodied.envs.fr3.joint_model import JointValues
from embodied.envs.fr3.tasks.task import Parameter, View
from embodied.envs.mujoco.batch_env import Floats, MujocoVecEnv, Outcome, Rows
from embodied.envs.mujoco.cameras import Cameras
from embodied.envs.spaces import Ranges
from embodied.envs.wrappers import point_cloud

VIEWS = ("front", "wrist")


@dataclass(frozen=True)
class Config:
    """Settings of an FR3 environment.

    `drawing` "light" renders boxes instead of meshes and no arm, which is hundreds of times faster
    without a GPU. With `objects` "privileged", `state` has the robot's own values only and
    `privileged/state` has everything, for critics and demonstrators. `randomize` gives quantities
    of `embodied.envs.fr3.domain_randomization` a range to be sampled from in each episode, as
    further task parameters. `arm` sets joint parameters (`embodied.envs.fr3.joint_model`), as
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


class Fr3(MujocoVecEnv):
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
        joint_model.write(model, config.arm)
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

    def outcome(self, action: Floats) -> Outcome:
        return Outcome(*self.given.judge(self.view(np.arange(self.num_envs))))

    def place(self, rows: Rows, draws: Floats) -> None:
        start = self.what.start(self.native(rows), draws)
        q = self._start.reach(start.tool)
        tool, _, _ = fr3.forward(q)
        qpos = self.batch.qpos
        qpos[rows, :7] = q
        qpos[rows, 7:9] = start.width[:, None] / 2
        for name, (place, turn) in start.bodies(tool).items():
            first = self._free[name]
            qpos[rows, first : first + 3] = place
            qpos[rows, first + 3 : first + 7] = turn
        for name, place in start.marker.items():
            self.batch.mocap_pos[rows, self._markers[name]] = place
        reference = self.controller.begin(q, start.width)
        for key, value in {**reference, **start.memory}.items():
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

    def native(self, rows: Rows) -> dict[str, Floats]:
        """Task parameters [n] of `rows` in their own units, by name."""
        return self.given.native(self.task[rows])

    def view(self, rows: Rows) -> View:
        """The `View` of `rows` for rewards, observations and descriptions."""
        qpos = self.batch.qpos[rows]
        tool, _, _ = fr3.forward(qpos[:, :7])
        place = {name: qpos[:, at : at + 3] for name, at in self._free.items()}
        for name, marker in self._markers.items():
            place[name] = self.batch.mocap_pos[rows, marker]
        return View(
            q=qpos[:, :7],
            dq=self.batch.qvel[rows, :7],
            tool=tool,
            lead=self.memory["place"][rows] - tool,
            width=qpos[:, 7] + qpos[:, 8],
            place=place,
            turn={name: qpos[:, at + 3 : at + 7] for name, at in self._free.items()},
            param=self.native(rows),
            memory={key: self.memory[key][rows] for key in self._own},
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

    def describe(self, row: int = 0) -> str:
        return self.what.describe(self.view(np.array([row])))

    def _spec(self, drawn: tuple[str, ...]) -> Spec:
        spec = self.given.spec(self.controller)
        if self.config.objects == "privileged":
            robot = Leaf((len(ROBOT_NAMES),), names=ROBOT_NAMES)
            spec = spec.with_obs(**{"state": robot, "privileged/state": spec.obs["state"]})
        if self.config.reveal and drawn:
            leaf = Leaf((len(drawn),), low=0.0, high=1.0, names=drawn)
            spec = spec.with_obs(**{"privileged/random": leaf})
        return spec


def _cameras(config: Config) -> Cameras | None:
    names = tuple(config.cameras)
    if config.clouds is not None:
        return point_cloud.Clouds(names, config.image_size, config.clouds)
    return Cameras(names, config.image_size) if names else None
