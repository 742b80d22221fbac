"""So101Pick: an SO-101-style arm picks up a cube, by joint positions as its driver takes them.

Cube, rewards and observations are those of the FR3's lift (`embodied.envs.fr3.tasks.objects.Lift`),
with a smaller cube, a lower height, and the servo stiffness as one more task parameter. Actions in
[-1, 1] are the joint limits and the closed and open hand, by the names of LeRobot's datasets.
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
from embodied.core.spec import Leaf
from embodied.embodiments import so101
from embodied.embodiments.arrays import Floats, namespace
from embodied.embodiments.controller import Controller
from embodied.embodiments.named_controllers import controller_node
from embodied.envs.fr3.base import TaskInstance, addresses
from embodied.envs.fr3.tasks.objects import Lift, approach
from embodied.envs.fr3.tasks.task import Flags, Parameter, Term, View, add_box, distance
from embodied.envs.mujoco.batch_env import STATE, Outcome, Rows
from embodied.envs.mujoco.cameras import Cameras, looking
from embodied.envs.so101 import DT, JOINTS, ROBOT_NAMES, So101Arm, scene

RAISED = 0.06  # m
LARGEST = 0.02  # half edge of a cube, m
HELD = 0.05  # m between the tool and the centre of a cube in the hand, at most
TURNED = np.array([0.5, 0.1, 0.1, 0.1, 0.5])  # rad from home, where episodes begin at most
OPEN = (0.03, so101.OPEN)  # m, of the hand where episodes begin
GRIP = (200.0, 4.0, 8.0)  # of the hand: N/m, N s/m, and N at most


def grasp(view: View) -> Floats:
    """The hand has closed on the cube, which lies beside the fixed jaw."""
    close = distance(view.tool, view.place["cube"]) < 0.03
    holds = close & (view.width < 2.6 * view.param["cube_half"])
    return holds * namespace(view.width).ones_like(view.width)


def raised(view: View) -> Floats:
    """The share of the way up that the cube has gone, in [0, 1]."""
    height = view.place["cube"][:, 2] - view.param["cube_half"]
    return namespace(height).clip(height / RAISED, 0.0, 1.0)


class Pick(Lift):
    """Success: the cube's bottom is six centimetres above the table, with the cube in the hand."""

    text = "pick up the cube and raise it six centimetres above the table"
    parameters = (
        Parameter("cube_x", 0.18, 0.26),
        Parameter("cube_y", -0.10, 0.10),
        Parameter("cube_yaw", -0.4, 0.4, "rad"),
        Parameter("cube_half", 0.014, 0.018),
        Parameter("cube_friction", 0.8, 1.2, ""),
        Parameter("stiffness", 0.7, 1.4, ""),
    )
    terms: ClassVar[Mapping[str, Term]] = {"approach": approach, "grasp": grasp, "raised": raised}
    horizon = 80

    def edit(self, spec: mujoco.MjSpec) -> None:
        half = (LARGEST, LARGEST, LARGEST)
        cube = add_box(spec, "cube", half, (0.85, 0.23, 0.16, 1.0), 0.03).geoms[0]
        cube.contype = 1  # the arm is made of shapes that touch what has this bit

    def success(self, view: View) -> Flags:
        high = view.place["cube"][:, 2] - view.param["cube_half"] > RAISED
        return high & (distance(view.tool, view.place["cube"]) < HELD)


@dataclass(frozen=True)
class Config:
    """Settings of the SO-101's pick task.

    With `objects` "privileged", `state` has the robot's own values only and `privileged/state` has
    everything, for critics and demonstrators. `controller` is joint_position, cartesian_delta,
    cartesian_pose, or a node.
    """

    num_envs: Count = 16  # parallel environments
    reward: Literal["sparse", "shaped"] = "sparse"  # kind of the reward
    cameras: tuple[Literal["front", "wrist"], ...] = ()  # cameras whose images are observations
    image_size: Count = 96  # pixels of an image's side
    horizon: Count = Pick.horizon  # control steps of an episode, 20 Hz
    objects: Literal["seen", "privileged"] = "seen"  # who sees the cube
    controller: str | Node = "joint_position"  # what actions mean
    ranges: Ranges = field(default_factory=dict)  # ranges of task parameters, by name
    threads: Count = 2  # CPU threads
    seed: CountOrZero = 0  # of the random numbers


class So101Pick(So101Arm):
    """B parallel arms, each with a cube on the table before it."""

    draws = JOINTS + 1

    def __init__(self, config: Config) -> None:
        self.config = config
        self.controller = build(controller_node(config.controller, "so101", DT), Controller)
        self.what = Pick()
        self.given = TaskInstance(self.what, config.reward, config.ranges)
        model = _compiled(self.what)
        spec = self.given.spec(self.controller, ROBOT_NAMES)
        if config.objects == "privileged":
            robot = Leaf((len(ROBOT_NAMES),), names=ROBOT_NAMES)
            spec = spec.with_obs(**{"state": robot, "privileged/state": spec.obs["state"]})
        super().__init__(
            model,
            spec,
            config.num_envs,
            substeps=round(DT / model.opt.timestep),
            horizon=config.horizon,
            threads=config.threads,
            seed=config.seed,
            name="so101_pick",
            cameras=Cameras(config.cameras, config.image_size) if config.cameras else None,
        )
        self._cube = addresses(model, self.what)["cube"]
        self.keep_references()

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        state = self.given.observe(self.view(rows)).astype(np.float32)
        if self.config.objects == "seen":
            return {"state": state}
        return {"state": state[:, : len(ROBOT_NAMES)].copy(), "privileged/state": state}

    def outcome(self, action: Floats) -> Outcome:
        return Outcome(*self.given.judge(self.view(np.arange(self.num_envs))))

    def place(self, rows: Rows, draws: Floats) -> None:
        q = so101.HOME + TURNED * (2 * draws[:, :JOINTS] - 1)
        self.stand(rows, q, OPEN[0] + (OPEN[1] - OPEN[0]) * draws[:, JOINTS])
        place, turn = self.what.start(self.native(rows), draws[:, :3]).free["cube"]
        self.batch.qpos[rows, self._cube : self._cube + 3] = place
        self.batch.qpos[rows, self._cube + 3 : self._cube + 7] = turn

    def retask(self, rows: Rows) -> None:
        native = self.native(rows)
        self.stiffen(rows, native["stiffness"])
        for (name, geom), value in self.what.shape(native).items():
            self.batch.expand(name)[rows, self.model.geom(geom).id] = value

    def native(self, rows: Rows) -> dict[str, Floats]:
        """Task parameters [n] of `rows` in their own units, by name."""
        return self.given.native(self.task[rows])

    def view(self, rows: Rows) -> View:
        """The `View` of `rows` for rewards, observations and descriptions."""
        qpos = self.batch.qpos[rows]
        q = qpos[:, :JOINTS]
        tool = so101.forward(q)[0]
        cube = qpos[:, self._cube :]
        return View(
            q=q,
            dq=self.batch.qvel[rows, :JOINTS],
            tool=tool,
            lead=self.memory["place"][rows] - tool,
            width=qpos[:, JOINTS],
            place={"cube": cube[:, :3]},
            turn={"cube": cube[:, 3:7]},
            param=self.native(rows),
            memory={},
        )

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

    def describe(self, row: int = 0) -> str:
        return self.what.describe(self.view(np.array([row])))


def _compiled(task: Pick) -> mujoco.MjModel:
    """The arm, a cube, and the cameras `front` and `wrist`."""
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
    task.edit(spec)
    return spec.compile()
