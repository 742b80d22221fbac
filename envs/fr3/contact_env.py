"""Fr3Contact: the FR3 in a contact task at the control rate, with joint steps and a stiffness.

One step is one tick of the robot's control loop. The action is what its safety chain sees: the
set-point's step of each joint, in units of the largest one, and the stiffness of the springs:

    K_i(s) = stiffness_i softest^((1 - s) / 2),   D_i = damping_i sqrt(K_i / stiffness_i)

A contact force above the limit at any physics step is a violation and ends the episode. Random
pushes act on the hand, at any tick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Bound, Count, CountOrZero, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.env import StateRoles
from embodied.core.spec import Leaf, Spec
from embodied.embodiments import cartesian_delta, fr3
from embodied.embodiments.cartesian_delta import CartesianDelta
from embodied.embodiments.joint_position import JointDelta, JointDeltaConfig
from embodied.envs.fr3.base import RenderScene, TaskInstance, compile_scene, mocaps, write_joints
from embodied.envs.fr3.task_env import TaskEnv
from embodied.envs.fr3.tasks.goal import path_length
from embodied.envs.fr3.tasks.task import View
from embodied.envs.mujoco.batch_env import Floats, Outcome, Rows

JOINTS = len(fr3.JOINTS)
PUSHES = 3  # of an episode
PUSH_TICKS = 6  # ticks that one lasts
PROGRESS = 10.0  # reward per m
REACHED = 5.0  # reward of success
LATE = 0.02  # cost of a tick
REFLEX_NAMES = tuple(
    f"{name}{i + 1}" for name in ("q", "dq", "tau", "ahead") for i in range(JOINTS)
)
AXES = "xyz"
STATE_NAMES = (
    *(f"{name}{i + 1}" for name in ("q", "dq") for i in range(JOINTS)),
    *(f"{name}_{axis}" for name in ("tool", "lead", "goal_from_tool") for axis in AXES),
)


Springs = tuple[NonNegative, ...]  # a value per joint
Share = Annotated[float, Bound(above=0.0, below=1.0)]


@dataclass(frozen=True)
class Config:
    """Settings of contact-rich FR3 tasks.

    `softest` keeps the damping ratio, as a robot's driver does; `acceleration` is as in the limits
    of the safety chain. `speed` and `lead`: see `embodied.embodiments.joint_position`.
    """

    task: str = "channel"  # which task: channel, or another with touch sensors
    num_envs: Count = 16  # parallel environments
    hertz: Positive = 50.0  # rate of the control loop, 1/s
    horizon: Count = 200  # steps of an episode, in ticks of the control loop
    limit: Positive = 30.0  # contact force that is a violation, N
    push: NonNegative = 20.0  # largest random push, N (0: none)
    stiffness: Springs = (600.0, 600.0, 600.0, 600.0, 250.0, 150.0, 50.0)  # at action 1, N m/rad
    damping: Springs = (50.0, 50.0, 50.0, 50.0, 30.0, 25.0, 15.0)  # likewise, N m s/rad
    softest: Share = 0.1  # factor of stiffness at the action -1
    acceleration: Positive = 8.0  # of the set-points, rad/s2
    speed: tuple[Positive, ...] = JointDeltaConfig.speed  # velocity of an action of 1, rad/s
    lead: tuple[Positive, ...] = JointDeltaConfig.lead  # how far set-points may be ahead, rad
    threads: Count = 2  # CPU threads
    seed: CountOrZero = 0  # of the random numbers


class Fr3Contact(TaskEnv):
    """Observations: `joints`, what a reflex in the safety chain sees (position, velocity, torque,
    set-point minus position), and `state`, what a task policy on a robot can see. The log has
    `violated` and `force`, the largest contact force of the tick (N)."""

    draws = 3 + 3 * PUSHES + PUSHES  # start, directions and sizes of pushes, their times

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dt = 1 / config.hertz
        self.given = TaskInstance(config.task, "sparse", {})
        self.what = self.given.task
        self.parameters = self.given.parameters
        if not self.what.touch:
            raise ConfigError(f"env.task: {config.task} has no touch sensors; use channel")
        model = compile_scene(self.what, pictures=False)
        write_joints(model, {"stiffness": config.stiffness, "damping": config.damping})
        self.controller = JointDelta(
            JointDeltaConfig(dt=self.dt, speed=config.speed, lead=config.lead)
        )
        vector = tuple(parameter.name for parameter in self.given.parameters)
        names = (*(f"velocity{i + 1}" for i in range(JOINTS)), "stiffness")
        super().__init__(
            model,
            Spec(
                obs={
                    "joints": Leaf((len(REFLEX_NAMES),), names=REFLEX_NAMES),
                    "state": Leaf((len(STATE_NAMES),), names=STATE_NAMES),
                },
                act=Leaf((len(names),), low=-1.0, high=1.0, names=names),
                dt=self.dt,
                task=Leaf((len(vector),), low=0.0, high=1.0, names=vector),
                text=self.given.task.text,
            ),
            config.num_envs,
            substeps=round(self.dt / self.what.timestep),
            horizon=config.horizon,
            threads=config.threads,
            seed=config.seed,
            name=f"fr3_{config.task}",
        )
        self._drawn = RenderScene(self.what)
        self._markers = mocaps(model, self.what)
        self._servos = np.array([model.actuator(name).id for name in fr3.JOINTS])
        self._touch = [int(model.sensor(name).adr[0]) for name in self.what.touch]
        self._hand = model.body("hand").id
        # Outputs of the batch are computed from the first use of their names on.
        self._outputs = self.batch.sensordata, self.batch.actuator_force
        zeros = np.zeros((config.num_envs, JOINTS))
        for name in ("setpoint", "step", "tau"):
            self.memory[name] = zeros.copy()
        self.memory["peak"] = np.zeros(config.num_envs)
        self.memory["path"] = np.zeros(config.num_envs)
        self.memory["when"] = np.zeros((config.num_envs, PUSHES))
        self.memory["push"] = np.zeros((config.num_envs, PUSHES, 3))

    @property
    def state_roles(self) -> StateRoles:
        return super().state_roles | StateRoles(times={"memory/when": None})

    def control(self, action: Floats) -> None:
        memory = self.memory
        q = self.batch.qpos[:, :JOINTS]
        most = self.config.acceleration * self.dt**2
        wanted = np.asarray(self.config.speed) * self.dt * action[:, :JOINTS]
        step = np.clip(wanted, memory["step"] - most, memory["step"] + most)
        scaled = step / (np.asarray(self.config.speed) * self.dt)
        target = self.controller(scaled, q, {"q": memory["setpoint"], "width": np.zeros(len(q))})[0]
        memory["step"][:] = target - memory["setpoint"]
        memory["setpoint"][:] = target
        self.batch.ctrl[:, :JOINTS] = target
        # Springs and dampers for stiffness actions [B, 1].
        ratio = self.config.softest ** (0.5 * (1 - action[:, JOINTS:]))
        stiffness = ratio * np.asarray(self.config.stiffness)
        self.batch.expand("actuator_gainprm")[:, self._servos, 0] = stiffness
        self.batch.expand("actuator_biasprm")[:, self._servos, 1] = -stiffness
        damping = np.sqrt(ratio) * np.asarray(self.config.damping)
        self.batch.expand("actuator_biasprm")[:, self._servos, 2] = -damping
        since = self.count[:, None] - memory["when"]
        acting = (since >= 0) & (since < PUSH_TICKS)
        force = (memory["push"] * acting[:, :, None]).sum(1)
        self.batch.xfrc_applied.reshape(self.num_envs, -1, 6)[:, self._hand, :3] = force

    def step_physics(self) -> None:
        peak = np.zeros(self.num_envs)
        for _ in range(self.substeps):
            self.batch.step()
            peak = np.maximum(peak, self.batch.sensordata[:, self._touch].sum(1))
        self.memory["peak"][:] = peak
        self.memory["tau"][:] = self.batch.actuator_force[:, self._servos]

    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        view = self.view(rows)
        ahead = self.memory["setpoint"][rows] - view.q
        joints = np.concatenate([view.q, view.dq, self.memory["tau"][rows], ahead], 1)
        goal = view.place["goal"] - view.tool
        state = np.concatenate([view.q, view.dq, view.tool, view.lead, goal], 1)
        return {"joints": joints.astype(np.float32), "state": state.astype(np.float32)}

    def outcome(self, action: Floats) -> Outcome:
        view = self.view(np.arange(self.num_envs))
        path = path_length(view)
        force = self.memory["peak"]
        violated = force > self.config.limit
        won = self.what.success(view) & ~violated
        reward = PROGRESS * (self.memory["path"] - path) + REACHED * won - LATE
        self.memory["path"][:] = path
        log = {"success": won, "violated": violated, "force": force.astype(np.float32)}
        return Outcome(reward, won | violated, log)

    def place(self, rows: Rows, draws: Floats) -> None:
        start = self.what.start(self.native(rows), draws[:, :3])
        # Joint positions [n, 7] with the tool at its start, pointing down.
        q = CartesianDelta(cartesian_delta.Config()).reach(start.tool)
        self.batch.qpos[rows, :JOINTS] = q
        self.batch.ctrl[rows, :JOINTS] = q
        for name, place in start.marker.items():
            self.batch.mocap_pos[rows, self._markers[name]] = place
        self.memory["setpoint"][rows] = q
        for name in ("step", "tau", "peak"):
            self.memory[name][rows] = 0.0
        # Times, directions (uniform on the sphere) and sizes of the pushes of an episode.
        when, turn, height, size = draws[:, 3:].reshape(len(rows), 4, PUSHES).transpose(1, 0, 2)
        up = 2 * height - 1
        flat = np.sqrt(1 - up**2)
        turn = math.tau * turn
        aim = np.stack([flat * np.cos(turn), flat * np.sin(turn), up], 2)
        self.memory["when"][rows] = np.floor(when * self.horizon)
        self.memory["push"][rows] = aim * ((0.5 + 0.5 * size) * self.config.push)[:, :, None]
        self.memory["path"][rows] = path_length(self.view(rows))

    def scene(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        return self._drawn.at(self.native(np.array([row])), self.batch.state[row])

    def view(self, rows: Rows) -> View:
        """The `View` of `rows` for rewards, observations and descriptions."""
        q = self.batch.qpos[rows, :JOINTS]
        tool = fr3.forward(q)[0]
        return View(
            q=q,
            dq=self.batch.qvel[rows, :JOINTS],
            tool=tool,
            lead=fr3.forward(self.memory["setpoint"][rows])[0] - tool,
            width=np.zeros(len(rows)),
            place={k: self.batch.mocap_pos[rows, at] for k, at in self._markers.items()},
            turn={},
            param=self.native(rows),
            memory={},
        )
