"""So101: reaching task of SO-101-style servo arms, with the controller of the real arm.

The model of `embodied.embodiments.so101` with position servos; the servo stiffness is randomized
per episode, as it varies between cheap servos.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, Ranges
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.env import GoalSpace
from embodied.core.spec import Leaf, Spec
from embodied.embodiments import so101
from embodied.embodiments.controller import Controller
from embodied.embodiments.named_controllers import controller_node
from embodied.envs.mujoco.batch_env import Floats, MujocoVecEnv, Outcome, Rows, action_leaf
from embodied.envs.mujoco.cameras import Point, looking
from embodied.envs.point_goals import PointGoals

JOINTS = len(so101.JOINTS)
TURNED = np.array([0.5, 0.2, 0.2, 0.2, 0.5])  # rad from home, where episodes begin at most
NEAR = 0.015  # m
DT = 0.05  # s of a control step
RANGES: Mapping[str, tuple[float, float]] = {
    "goal_x": (0.18, 0.32),  # m
    "goal_y": (-0.16, 0.16),
    "goal_z": (0.04, 0.20),
    "stiffness": (0.5, 2.0),  # of the servos, times that of the model
}
ROBOT_NAMES = (
    *(f"{what}{i}" for what in ("q", "dq") for i in range(1, JOINTS + 1)),
    *(f"{what}_{axis}" for what in ("tool", "lead") for axis in "xyz"),
    "width",
)
NAMES = (*ROBOT_NAMES, *(f"{what}_{axis}" for what in ("goal", "goal_from_tool") for axis in "xyz"))


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

    def __post_init__(self) -> None:
        for key, (low, high) in self.ranges.items():
            if key not in RANGES:
                raise ConfigError(f"ranges: unknown parameter {key!r}{nearest(key, RANGES)}")
            if low > high:
                raise ConfigError(f"ranges: {key}=[{low}, {high}] must be [low, high]")


class So101Arm(MujocoVecEnv):
    """B parallel arms on a table, moved by a controller.

    The arm's joints come first in `qpos`, then the opening of its hand.
    """

    controller: Controller

    def keep_references(self) -> None:
        """Allocate the references of the controller, one per env."""
        for key, value in self.controller.begin(so101.HOME[None], np.zeros(1)).items():
            self.memory[key] = np.zeros((self.num_envs, *value.shape[1:]))

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

    def stiffen(self, rows: Rows, times: Floats) -> None:
        """The servos of `rows` [n] as stiff as the model's, times `times` [n]."""
        for name, index in (("actuator_gainprm", 0), ("actuator_biasprm", 1)):
            stiffness = getattr(self.model, name)[:JOINTS, index]
            self.batch.expand(name)[rows, :JOINTS, index] = times[:, None] * stiffness


def scene(place: Point, target: Point) -> mujoco.MjSpec:
    """The arm of rods in the light; the camera `front` is at `place` and faces `target` (m)."""
    spec = mujoco.MjSpec.from_string(so101.mjcf())
    spec.worldbody.add_light(pos=[0.8, -0.6, 1.2], dir=[-0.6, 0.5, -1.0])
    spec.visual.headlight.ambient = [0.5] * 3
    spec.worldbody.add_camera(name="front", pos=place, quat=looking(place, target), fovy=40)
    return spec


class So101(So101Arm):
    """B parallel arms, each with a goal in the air; success: the tool is within 15 mm of it."""

    draws = JOINTS

    def __init__(self, config: Config) -> None:
        self.config = config
        self.controller = build(controller_node(config.controller, "so101", DT), Controller)
        ranges = {**RANGES, **config.ranges}
        self._low = np.array([low for low, _ in ranges.values()])
        self._span = np.array([high for _, high in ranges.values()]) - self._low
        # A ball that shows the goal and touches nothing.
        spec = scene((0.62, -0.42, 0.4), (0.16, 0.0, 0.1))
        ball = spec.worldbody.add_body(name="goal", mocap=True)
        sphere = mujoco.mjtGeom.mjGEOM_SPHERE
        size = [NEAR, 0, 0]
        ball.add_geom(type=sphere, size=size, rgba=[0.2, 0.7, 0.35, 0.6], contype=0, conaffinity=0)
        model = spec.compile()
        vector = tuple(RANGES)
        super().__init__(
            model,
            Spec(
                obs={"state": Leaf((len(NAMES),), names=NAMES)},
                act=action_leaf(self.controller.names),
                dt=DT,
                task=Leaf((len(vector),), low=0.0, high=1.0, names=vector),
                text="move the tool to the green ball",
            ),
            config.num_envs,
            substeps=round(DT / model.opt.timestep),
            horizon=config.horizon,
            threads=config.threads,
            seed=config.seed,
            name="so101_reach",
        )
        self.keep_references()

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        q = self.batch.qpos[rows]
        goal = self.goals(rows)
        tool = so101.forward(q[:, :JOINTS])[0]
        parts = [q[:, :JOINTS], self.batch.qvel[rows, :JOINTS], tool]
        parts += [self.memory["place"][rows] - tool, q[:, JOINTS:], goal, goal - tool]
        return {"state": np.concatenate(parts, 1).astype(np.float32)}

    def outcome(self, action: Floats) -> Outcome:
        tool = so101.forward(self.batch.qpos[:, :JOINTS])[0]
        far = np.linalg.norm(tool - self.goals(np.arange(self.num_envs)), axis=1)
        won = far < NEAR
        reward = won * 1.0
        if self.config.reward == "shaped":
            reward = np.where(won, 1.0, 0.1 * (1 - np.tanh(far / 0.1)))
        return Outcome(reward, won, {"success": won})

    def place(self, rows: Rows, draws: Floats) -> None:
        q = so101.HOME + TURNED * (2 * draws - 1)
        self.stand(rows, q, np.full(len(rows), so101.OPEN / 2))
        self.batch.mocap_pos[rows, 0] = self.goals(rows)

    def retask(self, rows: Rows) -> None:
        self.stiffen(rows, self.native(rows)[:, 3])

    def native(self, rows: Rows) -> Floats:
        """Task parameters [n, 4] of `rows`, in the units of `RANGES`."""
        return self._low + self.task[rows] * self._span

    def goals(self, rows: Rows) -> Floats:
        """The goals [n, 3] (m) of the tools of `rows`."""
        return self.native(rows)[:, :3]

    def goal_space(self) -> GoalSpace:
        """The goals of the tool."""
        shaped = self.config.reward == "shaped"
        return PointGoals(self.spec.obs["state"], NEAR, shaped, self.name)

    def describe(self, row: int = 0) -> str:
        one = np.array([row])
        tool = so101.forward(self.batch.qpos[one, :JOINTS])[0]
        return f"The tool is at {_words(tool[0])}, the goal at {_words(self.goals(one)[0])}."


def _words(place: Floats) -> str:
    x, y, z = 100 * place
    return f"x {x:.1f}, y {y:.1f}, z {z:.1f} cm"
