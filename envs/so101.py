"""SO-101-style servo arms: So101 reaches a goal, So101Pick picks up a cube.

The model of `embodied.embodiments.so101` with position servos; the servo stiffness is randomized
per episode, as it varies between cheap servos. Cube, rewards and observations of the pick task are
those of the FR3's lift (`embodied.envs.fr3.tasks.objects.Lift`), with a smaller cube and a lower
height; its actions in [-1, 1] are the joint limits and the closed and open hand, by the names of
LeRobot's datasets.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, Ranges
from embodied.core.build import Node, build
from embodied.core.env import GoalSpace
from embodied.core.spec import Spec
from embodied.embodiments import so101
from embodied.embodiments.controller import Controller
from embodied.embodiments.named_controllers import controller_node
from embodied.envs.fr3.base import TaskInstance, addresses, without_objects
from embodied.envs.fr3.task_env import TaskEnv
from embodied.envs.fr3.tasks.goal import GoalTask
from embodied.envs.fr3.tasks.objects import Lift, approach, grasp, raised
from embodied.envs.fr3.tasks.task import (
    Parameter,
    Task,
    Term,
    View,
    add_box,
    distance,
)
from embodied.envs.mujoco.batch_env import STATE, Floats, Outcome, Rows
from embodied.envs.mujoco.cameras import Cameras, Point, looking
from embodied.envs.point_goals import PointGoals

JOINTS = len(so101.JOINTS)
TURNED = np.array([0.5, 0.2, 0.2, 0.2, 0.5])  # rad from home, where episodes begin at most
DT = 0.05  # s of a control step
ROBOT_NAMES = (
    *(f"{what}{i}" for what in ("q", "dq") for i in range(1, JOINTS + 1)),
    *(f"{what}_{axis}" for what in ("tool", "lead") for axis in "xyz"),
    "width",
)


class Touch(GoalTask):
    """Success: the tool point is within 15 mm of a goal in the air."""

    text = "move the tool to the green ball"
    parameters = (
        Parameter("goal_x", 0.18, 0.32),
        Parameter("goal_y", -0.16, 0.16),
        Parameter("goal_z", 0.04, 0.20),
        Parameter("stiffness", 0.5, 2.0, ""),  # of the servos, times that of the model
    )
    close = 0.015


@dataclass(frozen=True)
class Config:
    """Settings of the SO-101's reach task.

    `controller` is cartesian_delta, cartesian_pose, joint_position, or a node.
    """

    num_envs: Count = 16  # parallel environments
    reward: Literal["sparse", "shaped"] = "sparse"  # kind of the reward
    horizon: Count = 60  # control steps of an episode, 20 Hz
    controller: str | Node = "cartesian_delta"  # what actions mean
    ranges: Ranges = field(default_factory=dict)  # ranges of task parameters, by name
    threads: Count = 2  # CPU threads
    seed: CountOrZero = 0  # of the random numbers


class So101Arm(TaskEnv):
    """B parallel arms on a table, moved by a controller.

    The arm's joints come first in `qpos`, then the opening of its hand.
    """

    def __init__(
        self, config: Config, task: Task, spec: mujoco.MjSpec, cameras: Cameras | None = None
    ) -> None:
        self.config = config
        self.controller = build(controller_node(config.controller, "so101", DT), Controller)
        self.what = task
        self.given = TaskInstance(task, config.reward, config.ranges)
        task.edit(spec)
        model = spec.compile()
        super().__init__(
            model,
            self.own_spec(),
            config.num_envs,
            substeps=round(DT / model.opt.timestep),
            horizon=config.horizon,
            threads=config.threads,
            seed=config.seed,
            name=self.name,
            cameras=cameras,
        )
        # The references of the controller, one per env.
        for key, value in self.controller.begin(so101.HOME[None], np.zeros(1)).items():
            self.memory[key] = np.zeros((self.num_envs, *value.shape[1:]))

    def own_spec(self) -> Spec:
        return self.given.spec(self.controller, ROBOT_NAMES)

    def objects(self, rows: Rows) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Positions [n, 3] and quaternions [n, 4] of the task's things by name."""
        raise NotImplementedError

    def control(self, action: Floats) -> None:
        joints, width, moved = self.controller(action, self.batch.qpos[:, :JOINTS], self.memory)
        for key, value in moved.items():
            self.memory[key][:] = value
        self.batch.ctrl[:, :JOINTS] = joints
        self.batch.ctrl[:, JOINTS] = width

    def stand(self, rows: Rows, q: Floats, width: Floats) -> None:
        """Put the arms of `rows` [n] at rest at joints `q` [n, 5], hands open by `width` [n] m."""
        for key, value in self.controller.begin(q, width).items():
            self.memory[key][rows] = value
        for field_of_state in (self.batch.qpos, self.batch.ctrl):
            field_of_state[rows, :JOINTS] = q
            field_of_state[rows, JOINTS] = width

    def retask(self, rows: Rows) -> None:
        native = self.native(rows)
        # The servos, as stiff as the model's times the parameter.
        for name, index in (("actuator_gainprm", 0), ("actuator_biasprm", 1)):
            stiffness = getattr(self.model, name)[:JOINTS, index]
            self.batch.expand(name)[rows, :JOINTS, index] = native["stiffness"][:, None] * stiffness
        for (name, geom), value in self.what.shape(native).items():
            self.batch.expand(name)[rows, self.model.geom(geom).id] = value

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        return {"state": self.given.observe(self.view(rows)).astype(np.float32)}

    def view(self, rows: Rows) -> View:
        """The `View` of `rows` for rewards, observations and descriptions."""
        qpos = self.batch.qpos[rows]
        q = qpos[:, :JOINTS]
        tool = so101.forward(q)[0]
        place, turn = self.objects(rows)
        return View(
            q=q,
            dq=self.batch.qvel[rows, :JOINTS],
            tool=tool,
            lead=self.memory["place"][rows] - tool,
            width=qpos[:, JOINTS],
            place=place,
            turn=turn,
            param=self.native(rows),
            memory={},
        )


def scene(place: Point, target: Point) -> mujoco.MjSpec:
    """The arm of rods in the light; the camera `front` is at `place` and faces `target` (m)."""
    spec = mujoco.MjSpec.from_string(so101.mjcf())
    spec.worldbody.add_light(pos=[0.8, -0.6, 1.2], dir=[-0.6, 0.5, -1.0])
    spec.visual.headlight.ambient = [0.5] * 3
    spec.worldbody.add_camera(name="front", pos=place, quat=looking(place, target), fovy=40)
    return spec


class So101(So101Arm):
    """B parallel arms, each with a goal in the air."""

    name = "so101_reach"
    draws = JOINTS

    def __init__(self, config: Config) -> None:
        super().__init__(config, Touch(), scene((0.62, -0.42, 0.4), (0.16, 0.0, 0.1)))

    def outcome(self, action: Floats) -> Outcome:
        view = self.view(np.arange(self.num_envs))
        far = distance(view.tool, view.place["goal"])
        won = far < self.what.close
        reward = won * 1.0
        if self.config.reward == "shaped":
            reward = np.where(won, 1.0, 0.1 * (1 - np.tanh(far / 0.1)))
        return Outcome(reward, won, {"success": won})

    def place(self, rows: Rows, draws: Floats) -> None:
        q = so101.HOME + TURNED * (2 * draws - 1)
        self.stand(rows, q, np.full(len(rows), so101.OPEN / 2))
        self.batch.mocap_pos[rows, 0] = self.objects(rows)[0]["goal"]

    def objects(self, rows: Rows) -> tuple[dict[str, Floats], dict[str, Floats]]:
        native = self.native(rows)
        return {"goal": np.stack([native[f"goal_{axis}"] for axis in "xyz"], 1)}, {}

    def goal_space(self) -> GoalSpace:
        shaped = self.config.reward == "shaped"
        return PointGoals(self.spec.obs["state"], self.what.close, shaped, self.name)


LARGEST = 0.02  # half edge of a cube, m
PICK_TURNED = np.array([0.5, 0.1, 0.1, 0.1, 0.5])  # rad from home, where episodes begin at most
OPENINGS = (0.03, so101.OPEN)  # m, of the hand where episodes begin
GRIP = (200.0, 4.0, 8.0)  # of the hand: N/m, N s/m, and N at most


class Pick(Lift):
    text = "pick up the cube and raise it six centimetres above the table"
    parameters = (
        Parameter("cube_x", 0.18, 0.26),
        Parameter("cube_y", -0.10, 0.10),
        Parameter("cube_yaw", -0.4, 0.4, "rad"),
        Parameter("cube_half", 0.014, 0.018),
        Parameter("cube_friction", 0.8, 1.2, ""),
        Parameter("stiffness", 0.7, 1.4, ""),
    )
    top = 0.06
    # The cube lies beside the fixed jaw.
    terms: ClassVar[Mapping[str, Term]] = {
        "approach": approach,
        "grasp": grasp(0.03),
        "raised": raised(top),
    }

    def edit(self, spec: mujoco.MjSpec) -> None:
        half = (LARGEST, LARGEST, LARGEST)
        cube = add_box(spec, "cube", half, (0.85, 0.23, 0.16, 1.0), 0.03).geoms[0]
        cube.contype = 1  # the arm is made of shapes that touch what has this bit


@dataclass(frozen=True)
class PickConfig(Config):
    """Settings of the SO-101's pick task.

    With `objects` "privileged", `state` has the robot's own values only and `privileged/state` has
    everything, for critics and demonstrators. `controller` is joint_position, cartesian_delta,
    cartesian_pose, or a node.
    """

    horizon: Count = Pick.horizon  # control steps of an episode, 20 Hz
    controller: str | Node = "joint_position"  # what actions mean
    cameras: tuple[Literal["front", "wrist"], ...] = ()  # cameras whose images are observations
    image_size: Count = 96  # pixels of an image's side
    objects: Literal["seen", "privileged"] = "seen"  # who sees the cube


class So101Pick(So101Arm):
    """B parallel arms, each with a cube on the table before it."""

    name = "so101_pick"
    draws = JOINTS + 1

    def __init__(self, config: PickConfig) -> None:
        self.hides = config.objects == "privileged"
        cameras = Cameras(config.cameras, config.image_size) if config.cameras else None
        super().__init__(config, Pick(), _pick_scene(), cameras)
        self._cube = addresses(self.model, self.what)["cube"]

    def own_spec(self) -> Spec:
        spec = super().own_spec()
        return without_objects(spec, ROBOT_NAMES) if self.hides else spec

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        obs = super().observe(rows)
        if not self.hides:
            return obs
        state = obs["state"]
        return {"state": state[:, : len(ROBOT_NAMES)].copy(), "privileged/state": state}

    def place(self, rows: Rows, draws: Floats) -> None:
        q = so101.HOME + PICK_TURNED * (2 * draws[:, :JOINTS] - 1)
        self.stand(rows, q, OPENINGS[0] + (OPENINGS[1] - OPENINGS[0]) * draws[:, JOINTS])
        place, turn = self.what.start(self.native(rows), draws[:, :3]).free["cube"]
        self.batch.qpos[rows, self._cube : self._cube + 3] = place
        self.batch.qpos[rows, self._cube + 3 : self._cube + 7] = turn

    def objects(self, rows: Rows) -> tuple[dict[str, Floats], dict[str, Floats]]:
        cube = self.batch.qpos[rows, self._cube : self._cube + 7]
        return {"cube": cube[:, :3]}, {"cube": cube[:, 3:]}

    @cached_property
    def _drawn(self) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """A model of its own for pictures: the size of the cube is written into it."""
        model = copy.copy(self.model)
        return model, mujoco.MjData(model)

    def scene(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        model, data = self._drawn
        for (name, geom), value in self.what.shape(self.native(np.array([row]))).items():
            getattr(model, name)[model.geom(geom).id] = value[0]
        mujoco.mj_setState(model, data, self.batch.state[row], STATE)
        mujoco.mj_forward(model, data)
        return model, data


def _pick_scene() -> mujoco.MjSpec:
    """The arm, and the cameras `front` and `wrist`."""
    spec = scene((0.52, -0.28, 0.32), (0.16, 0.01, 0.07))
    # Friction cones without slack, or a held cube creeps out of the hand.
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.option.impratio = 10.0
    hand = spec.actuator("gripper")
    hand.gainprm[0] = GRIP[0]
    hand.biasprm[1] = -GRIP[0]
    hand.biasprm[2] = -GRIP[1]
    hand.forcerange = [-GRIP[2], GRIP[2]]
    # On the hand, looking along its jaws; upwards is away from the base in a grasp from above.
    eye = (0.0, 0.02, 0.06)
    wrist = looking(eye, (0.105, 0.02, 0.0), (0.0, 0.0, 1.0))
    spec.body("hand").add_camera(name="wrist", pos=eye, quat=wrist, fovy=70)
    return spec
