"""MujocoArm: a simulation of any arm, made from its MJCF or URDF file and its arm file.

Physics run in real time: every read first catches up with the clock. Each joint is held by a spring
and a damper whose gains come from the joint's inertia at the home pose and a `bandwidth` w,

    torque = M_ii (2 pi w)^2 (target - q) - 2 M_ii (2 pi w) dq,   at most the effort of the arm file

Gravity is compensated. It shows that driver settings, limits and kinematics fit together; the
friction, delay and gains of your real arm are others.

What pushes on a simulated arm is told by an observer of its momentum (De Luca, Albu-Schaeffer,
Haddadin and Hirzinger, 2006), p = M(q) dq, from the commanded torques tau and a model of the arm:

    r = K (p - integral of (tau + C' dq - g + r)),   so that  dr/dt = K (tau_ext - r)

From one sample to the next M hardly changes, so p less the integral of C' dq changes by M times the
change of dq less C dq: neither an acceleration nor a derivative of M is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mujoco
import numpy as np

from embodied.core.bounds import Bound, CountOrZero, Number
from embodied.core.build import ConfigError
from embodied.embodiments.kinematics.arm import ArmFile, read_arm_file
from embodied.embodiments.kinematics.from_mujoco import compile_spec, read_spec
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError

TIMESTEP = 0.002  # s
ARMATURE = 0.01  # kg m^2: of the motors, where the file has none
BEHIND = 0.25  # s of physics that are caught up with at most: after a stall the world goes on late
BANDWIDTH = 100.0  # 1/s
STICKS = 0.05  # rad/s below which Coulomb friction is taken as smaller


class MomentumObserver:
    """Call `step` with the torques of every step of the controller, `update` with a sample of the
    motion now and then. `external` [n] are the estimated external joint torques, N m."""

    def __init__(self, n: int) -> None:
        self.external = np.zeros(n)
        self._dq = np.zeros(n)
        self._known = np.zeros(n)
        self._steps = 0

    def step(self, bias: Floats, torque: Floats) -> None:
        """Note the torques [n] of a step: what motion and gravity need (`bias`: C dq + g, friction
        included), and what was commanded."""
        self._known += bias - torque
        self._steps += 1

    def update(self, inertia: Floats, dq: Floats, period: float) -> None:
        """Estimate anew from the joint-space `inertia` [n, n] and the measured `dq` [n], where a
        step takes `period` s."""
        if not self._steps:
            return
        dt = self._steps * period
        pushed = inertia @ (dq - self._dq) / dt + self._known / self._steps
        self.external += (1 - np.exp(-BANDWIDTH * dt)) * (pushed - self.external)
        self._dq = dq.copy()
        self._known[:] = 0
        self._steps = 0


def mujoco_bias(model: Any, data: Any, dofs: Sequence[int]) -> Floats:
    """`bias` [n] of the joints `dofs` of a MuJoCo model, whose passive forces (damping, compensated
    gravity) and Coulomb friction are known."""
    friction = model.dof_frictionloss[dofs] * np.tanh(data.qvel[dofs] / STICKS)
    return data.qfrc_bias[dofs] - data.qfrc_passive[dofs] + friction


def mujoco_inertia(model: Any, data: Any, dofs: Sequence[int]) -> Floats:
    """The joint-space inertia [n, n] of the joints `dofs` of a MuJoCo model."""
    inertia = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, data, inertia)
    return inertia[np.ix_(dofs, dofs)]


class SimulatedArm(Driver):
    """An arm in MuJoCo: every read and write first catches up with the clock. `at`, `dof` and
    `servos` are the addresses of its joints' positions, velocities and actuators."""

    def __init__(self, noise: float, seed: int, clock: Callable[[], float]) -> None:
        self.noise = noise  # standard deviation of measured positions, rad (m)
        self.random = np.random.default_rng(seed)
        self.clock = clock
        self.connected = False

    def take_model(self, model: Any) -> None:
        """Go on with `model`, whose joints and actuators are named as in `joints`."""
        self.model = model
        self.data = mujoco.MjData(model)
        self.at = [model.joint(name).qposadr[0] for name in self.joints]
        self.dof = [model.joint(name).dofadr[0] for name in self.joints]
        self.servos = [model.actuator(name).id for name in self.joints]

    def start_clock(self) -> None:
        """Let time run from now on."""
        mujoco.mj_forward(self.model, self.data)
        self.observer = MomentumObserver(len(self.dof))
        self.last = self.clock()
        self.connected = True

    def read(self) -> ArmState:
        now = self._run()
        q = self.data.qpos[self.at] + self.random.normal(0, self.noise, len(self.at))
        dq = self.data.qvel[self.dof].copy()
        inertia = mujoco_inertia(self.model, self.data, self.dof)
        self.observer.update(inertia, dq, self.model.opt.timestep)
        torque = self.data.actuator_force[self.servos].copy()
        return ArmState(q, dq, torque, now, external=self.observer.external.copy())

    def close(self) -> None:
        self.connected = False

    def _run(self) -> float:
        """Let physics catch up with the clock."""
        now = self.clock()
        if not self.connected:
            raise DriverError("the simulated arm is not connected")
        self.last = min(max(self.last, now - BEHIND), now)  # the clock may go back
        for _ in range(int((now - self.last) / self.model.opt.timestep)):
            self._step()
        return now

    def _step(self) -> None:
        """Run one step of the physics."""
        mujoco.mj_step(self.model, self.data)
        bias = mujoco_bias(self.model, self.data, self.dof)
        self.observer.step(bias, self.data.actuator_force[self.servos])
        self.last += self.model.opt.timestep


@dataclass(frozen=True)
class Config:
    """Settings of a simulated arm of your own file."""

    file: str  # MJCF or URDF
    arm: str  # arm file of it (`embodied robot describe`)
    meshes: str | None = None  # folder of the mesh files; null: as the file says
    bandwidth: Annotated[float, Bound(above=0.0, high=50.0)] = 5.0  # Hz of the joints
    noise: Annotated[float, Bound(0.0, 10.0)] = 0.0  # deviation of measured positions, rad (m)
    contacts: bool = False  # whether the arm's parts touch each other and the world
    start: tuple[Number, ...] = ()  # joints [n] where it is found, rad (m); empty: its home pose
    seed: CountOrZero = 0  # of the noise


class MujocoArm(SimulatedArm):
    """A simulated arm with nothing in front of it, which senses nothing beyond its joints."""

    world = None  # a simulation: results of calibration are not kept

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config.noise, config.seed, clock)
        self.config = config
        self.table = read_arm_file(config.arm)
        self.joints = tuple(joint.name for joint in self.table.joints)
        self.grip = None if self.table.hand is None else 0.0
        if config.start and len(config.start) != len(self.joints):
            raise ConfigError(f"driver.start needs {len(self.joints)} joint positions")

    def connect(self) -> None:
        self.take_model(_compiled(self.table, self.config))
        hand = self.table.hand
        fingers = hand.joints if hand is not None else ()
        self._fingers = [self.model.joint(name).qposadr[0] for name in fingers]
        self._grips = [self.model.actuator(name).id for name in fingers]
        self.data.qpos[self.at] = self.config.start or self.table.home
        self._gains()
        self.data.ctrl[self.servos] = self.data.qpos[self.at]
        self.start_clock()

    def write(self, q: Floats, width: float) -> None:
        self._run()
        self.data.ctrl[self.servos] = q
        hand = self.table.hand
        if hand is not None:
            share, closed = width / hand.open, np.array(hand.closed)
            self.data.ctrl[self._grips] = closed + share * (np.array(hand.opened) - closed)

    def limit_hand(self, speed: float, force: float) -> None:
        """The fingers share the force by the way that each goes for a way of the opening."""
        hand = self.table.hand
        if hand is not None:
            way = np.abs(np.array(hand.opened) - hand.closed)
            most = force * hand.open / (len(way) * way)
            self.model.actuator_forcelimited[self._grips] = 1
            self.model.actuator_forcerange[self._grips] = np.stack([-most, most], 1)

    @property
    def width(self) -> float:
        hand = self.table.hand
        if hand is None or not self.connected:
            return 0.0
        closed, opened = np.array(hand.closed), np.array(hand.opened)
        shares = (self.data.qpos[self._fingers] - closed) / (opened - closed)
        return float(np.clip(shares.mean(), 0.0, 1.0) * hand.open)

    def release(self) -> None:
        """No stiffness; the damping stays."""
        self._run()
        self.model.actuator_gainprm[self.servos, 0] = 0.0
        self.model.actuator_biasprm[self.servos, 1] = 0.0

    def engage(self) -> None:
        self._run()
        self.stop()
        self._gains()

    def stop(self) -> None:
        if self.connected:
            self.data.ctrl[self.servos] = self.data.qpos[self.at]

    def _gains(self) -> None:
        """Set the gains of each joint by its inertia at this pose."""
        mujoco.mj_forward(self.model, self.data)
        inertia = mujoco_inertia(self.model, self.data, range(self.model.nv))
        servos = [*self.servos, *self._grips]
        own = np.diag(inertia)[self.model.jnt_dofadr[self.model.actuator_trnid[servos, 0]]]
        rate = 2 * np.pi * self.config.bandwidth
        self.model.actuator_gainprm[servos, 0] = own * rate**2
        self.model.actuator_biasprm[servos, 1] = -own * rate**2
        self.model.actuator_biasprm[servos, 2] = -2 * own * rate


def _compiled(table: ArmFile, config: Config) -> Any:
    """The file's model with one position servo for every joint of the arm and its hand, whatever
    actuators it came with. DriverError."""
    path = Path(config.file)
    try:
        spec = read_spec(path, config.meshes)
        for each in [*spec.actuators, *spec.keys]:
            spec.delete(each)
        for body in spec.bodies[1:]:
            body.gravcomp = 1.0
        fingers = () if table.hand is None else table.hand.joints
        efforts = [*table.limits.effort, *([0.0] * len(fingers))]
        names = [*(joint.name for joint in table.joints), *fingers]
        for name, effort in zip(names, efforts, strict=True):
            _add_servo(spec, name, effort)
        spec.option.timestep = TIMESTEP
        spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
        if not config.contacts:
            spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT
        return compile_spec(spec, path)
    except ConfigError as error:
        raise DriverError(str(error)) from error


def _add_servo(spec: Any, name: str, effort: float) -> None:
    joint = spec.joint(name)
    if joint is None:
        raise ConfigError(f"the robot file has no joint {name}, which the arm file has")
    if not joint.armature:
        joint.armature = ARMATURE
    servo = spec.add_actuator(name=name, target=name)
    servo.trntype = mujoco.mjtTrn.mjTRN_JOINT
    servo.set_to_position(kp=1.0, kv=1.0)
    if effort:
        servo.forcelimited = True
        servo.forcerange = [-effort, effort]
