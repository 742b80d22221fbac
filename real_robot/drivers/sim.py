"""A simulated FR3 (MuJoCo) as a driver, with noise of its measurements.

Physics run in real time: every read first catches up with the clock. Without a `world` it is the
manufacturer's model as it ships, with its joint friction and armature, not the model used in
training. A `world` brings its own model, objects in front of the arm and a measure of success.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import mujoco
import numpy as np

from embodied.core.bounds import Bound, CountOrZero, Number
from embodied.core.build import ConfigError, Node, build
from embodied.embodiments import fr3
from embodied.real_robot.drivers.driver import Tool, check_stiffness, damped, span, tool_springs
from embodied.real_robot.drivers.mujoco_arm import SimulatedArm
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError, Springs

GUIDED = 0.1  # of its damping: what a released arm keeps


@dataclass(frozen=True)
class Config:
    """Settings of the simulated FR3. `tool` is as in the Franka's driver."""

    noise: Annotated[float, Bound(0.0, 10.0)] = 0.0  # standard deviation of joint positions, rad
    seed: CountOrZero = 0  # of the noise and the world
    world: Node | None = None  # node of a World before the arm; null: none
    tool: Tool | None = None  # springs on the tool's pose; null: on the joints
    start: tuple[Number, ...] | None = None  # joints [7] where it is found, rad; null: home pose

    def __post_init__(self) -> None:
        if self.start is not None and len(self.start) != len(fr3.JOINTS):
            raise ConfigError(f"driver.start: {len(fr3.JOINTS)} joint positions are needed")


class World(Protocol):
    """The things in front of a simulated FR3. `names` are those of the numbers of `sense`."""

    names: tuple[str, ...]

    def compile(self) -> mujoco.MjModel:
        """The FR3 among its things: actuators take joint positions, `hand` half the opening."""
        ...

    def begin(
        self, model: mujoco.MjModel, data: mujoco.MjData, random: np.random.Generator
    ) -> None:
        """Lay things out for another episode; the arm is left as it is."""
        ...

    def sense(self, data: mujoco.MjData) -> Floats:
        """The numbers named in `names`."""
        ...


class Sim(SimulatedArm):
    """Joint or Cartesian impedance and a hand; gravity is compensated, as the real robot does
    itself."""

    joints = fr3.JOINTS
    grip = 0.0

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config.noise, config.seed, clock)
        self.config = config
        self._width = 0.0
        self._hold: JointHold | ToolHold | None = None
        self.world = None if config.world is None else build(config.world, World)
        self.sensed = () if self.world is None else self.world.names

    def connect(self) -> None:
        self.take_model(arm_spec().compile() if self.world is None else self.world.compile())
        # No world gives the arm more strength than it has.
        self.model.actuator_forcelimited[self.servos] = 1
        self.model.actuator_forcerange[self.servos] = np.stack([-fr3.TORQUE, fr3.TORQUE], 1)
        self.fingers = [self.model.joint(name).qposadr[0] for name in fr3.FINGERS]
        start = fr3.HOME if self.config.start is None else np.asarray(self.config.start)
        self.data.qpos[self.at] = start
        self.hand = self.model.actuator("hand").id
        self._strength = float(self.model.actuator_forcerange[self.hand, 1])
        tool = self.config.tool
        self._hold = JointHold(self) if tool is None else ToolHold(self, tool)
        self._hold.aim(start)
        self.renew()
        self.start_clock()

    def read(self) -> ArmState:
        measured = super().read()
        self._width = float(self.data.qpos[self.fingers].sum())
        return measured

    def write(self, q: Floats, width: float) -> None:
        self._run()
        self._held().aim(q)
        self.data.ctrl[self.hand] = width / fr3.OPEN * self.model.actuator_ctrlrange[self.hand, 1]

    def limit_hand(self, speed: float, force: float) -> None:
        """Half of the actuator's force goes to each finger."""
        most = min(2 * force, self._strength)
        self.model.actuator_forcerange[self.hand] = -most, most

    @property
    def springs(self) -> Springs | None:
        return None if self._hold is None else self._hold.springs

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        return None if self._hold is None else span(self._hold.springs)

    def stiffen(self, stiffness: Floats) -> None:
        check_stiffness(stiffness, self.stiffness, "the simulated arm")
        hold = self._held()
        hold.gains(stiffness, damped(hold.springs, stiffness))

    def release(self) -> None:
        """No stiffness, and a little damping."""
        self._run()
        springs = self._held().springs
        self._held().gains(0 * springs.stiffness, GUIDED * springs.damping)

    def engage(self) -> None:
        self._run()
        self.stop()

    def _held(self) -> JointHold | ToolHold:
        if self._hold is None:
            raise DriverError("the simulated arm is not connected")
        return self._hold

    @property
    def width(self) -> float:
        return self._width

    def stop(self) -> None:
        if self.connected and self._hold is not None:
            springs = self._hold.springs
            self._hold.aim(self.data.qpos[self.at].copy())
            self._hold.gains(springs.stiffness, springs.damping)

    def _step(self) -> None:
        self._held().before_step()
        super()._step()

    def sense(self) -> Floats:
        return np.zeros(0) if self.world is None else self.world.sense(self.data)

    def renew(self) -> None:
        if self.world is not None:
            self.world.begin(self.model, self.data, self.random)


def arm_spec(
    stiffness: Sequence[float] = fr3.STIFFNESS, damping: Sequence[float] = fr3.DAMPING
) -> mujoco.MjSpec:
    """The manufacturer's model, held by a joint impedance (N m/rad, N m s/rad), its gravity
    compensated, as the real robot does itself."""
    source = fr3.mjcf()
    spec = mujoco.MjSpec.from_file(str(source))
    spec.meshdir = str(source.parent / "meshes")
    for body in spec.bodies[1:]:  # before it is compiled: a model without it is never given it
        body.gravcomp = 1.0
    for i, name in enumerate(fr3.JOINTS):
        servo = spec.actuator(name)
        servo.gainprm[0] = stiffness[i]
        servo.biasprm[1:3] = -stiffness[i], -damping[i]
    return spec


SMALL = 1e-4  # c: near a singularity the posture's torques fade out


class JointHold:
    """The servos as the model has them."""

    def __init__(self, arm: SimulatedArm) -> None:
        self.arm = arm
        model = arm.model
        stiffness = model.actuator_gainprm[arm.servos, 0].copy()
        damping = -model.actuator_biasprm[arm.servos, 2]
        self.springs = Springs("joints", stiffness, damping, np.full(len(stiffness), np.inf))

    def aim(self, q: Floats) -> None:
        """Put the springs' rest to joint targets [7] (rad)."""
        self.arm.data.ctrl[self.arm.servos] = q

    def gains(self, stiffness: Floats, damping: Floats) -> None:
        """Set stiffness and damping [m] of the springs; zero stiffness lets go."""
        model, servos = self.arm.model, self.arm.servos
        model.actuator_gainprm[servos, 0] = stiffness
        model.actuator_biasprm[servos, 1] = -stiffness
        model.actuator_biasprm[servos, 2] = -damping

    def before_step(self) -> None:
        """Set the servos for the next step of the physics."""


class ToolHold:
    """The servos become motors, whose torques are computed here, at every step of the physics:

        torque = J' (K clip(e) - D v) + (1 - J' (J J' + c)^-1 J) (k (q_0 - q) - 2 sqrt(k) dq)

    with J at the tool; e is the tool's distance from where the joint target would put it, q_0 the
    posture in which the arm was connected. Gravity is compensated by the physics."""

    def __init__(self, arm: SimulatedArm, tool: Tool) -> None:
        self.arm = arm
        self.springs = tool_springs(tool)
        self.stiffness = self.springs.stiffness
        self.damping = self.springs.damping
        self.elbow = tool.elbow
        self.posture = arm.data.qpos[arm.at].copy()
        model = arm.model
        model.actuator_gainprm[arm.servos, 0] = 1.0
        model.actuator_biasprm[arm.servos, :3] = 0.0
        model.actuator_ctrllimited[arm.servos] = 0
        self.aim(self.posture)

    def aim(self, q: Floats) -> None:
        self.place, self.turn, _ = fr3.forward(q[None])

    def gains(self, stiffness: Floats, damping: Floats) -> None:
        self.stiffness = stiffness
        self.damping = damping

    def before_step(self) -> None:
        self.arm.data.ctrl[self.arm.servos] = self.torque()

    def torque(self) -> Floats:
        """Joint torques [7] (N m) at the present state."""
        q, dq = self.arm.data.qpos[self.arm.at], self.arm.data.qvel[self.arm.dof]
        place, turn, jacobians = fr3.forward(q[None])
        jacobian, stretch = jacobians[0], self.springs.stretch
        e = np.concatenate([self.place - place, fr3.rotation_error(self.turn, turn)], 1)[0]
        pull = self.stiffness * np.clip(e, -stretch, stretch) - self.damping * (jacobian @ dq)
        held = self.elbow * (self.stiffness.any())  # a released arm has no posture to keep
        rest = held * (self.posture - q) - 2 * held**0.5 * dq
        inertia: Floats = jacobian @ jacobian.T + SMALL * np.eye(6)
        across = np.linalg.solve(inertia, np.asarray(jacobian @ rest, float))
        torque: Floats = jacobian.T @ (pull - across) + rest
        return torque
