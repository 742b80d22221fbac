"""MujocoArm: a simulation of any arm, made from its MJCF or URDF file and its arm file.

Physics run in real time: every read first catches up with the clock. Each joint is held by a spring
and a damper whose gains come from the joint's inertia at the home pose and a `bandwidth` w,

    torque = M_ii (2 pi w)^2 (target - q) - 2 M_ii (2 pi w) dq,   at most the effort of the arm file

Gravity is compensated. It shows that driver settings, limits and kinematics fit together; the
friction, delay and gains of your real arm are others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
from embodied.real_robot.drivers.momentum import (
    MomentumObserver,
    mujoco_bias,
    mujoco_inertia,
)
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError

TIMESTEP = 0.002  # s
BEHIND = 0.25  # s of physics that are caught up with at most
ARMATURE = 0.01  # kg m^2: of the motors, where the file has none


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


class MujocoArm(Driver):
    """A simulated arm with nothing in front of it, which senses nothing beyond its joints."""

    world = None
    """A simulation: results of calibration are not kept."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.table = read_arm_file(config.arm)
        self.joints = tuple(joint.name for joint in self.table.joints)
        self.grip = None if self.table.hand is None else 0.0
        if config.start and len(config.start) != len(self.joints):
            raise ConfigError(f"driver.start needs {len(self.joints)} joint positions")
        self.random = np.random.default_rng(config.seed)
        self.connected = False

    def connect(self) -> None:
        self.model = _compiled(self.table, self.config)
        self.data = mujoco.MjData(self.model)
        names, hand = self.joints, self.table.hand
        self._at = self.model.jnt_qposadr[[self._joint(name) for name in names]]
        self._dof = self.model.jnt_dofadr[[self._joint(name) for name in names]]
        self._servos = [self.model.actuator(name).id for name in names]
        fingers = hand.joints if hand is not None else ()
        self._fingers = self.model.jnt_qposadr[[self._joint(name) for name in fingers]]
        self._grips = [self.model.actuator(name).id for name in fingers]
        self.data.qpos[self._at] = self.config.start or self.table.home
        self._gains()
        self.data.ctrl[self._servos] = self.data.qpos[self._at]
        mujoco.mj_forward(self.model, self.data)
        self.observer = MomentumObserver(len(self.joints))
        self.last = self.clock()
        self.connected = True

    def read(self) -> ArmState:
        now = self._run()
        q = self.data.qpos[self._at] + self.random.normal(0, self.config.noise, len(self.joints))
        torque, dq = self.data.actuator_force[self._servos].copy(), self.data.qvel[self._dof].copy()
        self.observer.update(mujoco_inertia(self.model, self.data, self._dof), dq, TIMESTEP)
        return ArmState(q, dq, torque, now, external=self.observer.external.copy())

    def write(self, q: Floats, width: float) -> None:
        self._run()
        self.data.ctrl[self._servos] = q
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
        if hand is None or not self.connected or not len(self._fingers):
            return 0.0
        closed, opened = np.array(hand.closed), np.array(hand.opened)
        shares = (self.data.qpos[self._fingers] - closed) / (opened - closed)
        return float(np.clip(shares.mean(), 0.0, 1.0) * hand.open)

    def release(self) -> None:
        """No stiffness; the damping stays."""
        self._run()
        self.model.actuator_gainprm[self._servos, 0] = 0.0
        self.model.actuator_biasprm[self._servos, 1] = 0.0

    def engage(self) -> None:
        self._run()
        self.stop()
        self._gains()

    def stop(self) -> None:
        if self.connected:
            self.data.ctrl[self._servos] = self.data.qpos[self._at]

    def close(self) -> None:
        self.connected = False

    def _joint(self, name: str) -> int:
        number = int(mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_JOINT, name))
        if number < 0:
            raise DriverError(f"{self.config.file} has no joint {name} of {self.config.arm}")
        return number

    def _gains(self) -> None:
        """Set the gains of each joint by its inertia at this pose."""
        mujoco.mj_forward(self.model, self.data)
        inertia = np.zeros((self.model.nv, self.model.nv))
        mujoco.mj_fullM(self.model, self.data, inertia)
        servos = [*self._servos, *self._grips]
        own = np.diag(inertia)[self.model.jnt_dofadr[self.model.actuator_trnid[servos, 0]]]
        rate = 2 * np.pi * self.config.bandwidth
        self.model.actuator_gainprm[servos, 0] = own * rate**2
        self.model.actuator_biasprm[servos, 1] = -own * rate**2
        self.model.actuator_biasprm[servos, 2] = -2 * own * rate

    def _run(self) -> float:
        """Let physics catch up with the clock."""
        now = self.clock()
        if not self.connected:
            raise DriverError("the simulated arm is not connected")
        self.last = min(max(self.last, now - BEHIND), now)  # the clock may go back
        steps = int((now - self.last) / TIMESTEP)
        for _ in range(steps):
            mujoco.mj_step(self.model, self.data)
            bias = mujoco_bias(self.model, self.data, self._dof)
            self.observer.step(bias, self.data.actuator_force[self._servos])
        self.last += steps * TIMESTEP
        return now


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
