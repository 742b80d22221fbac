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
from embodied.real_robot.drivers.simulated import SimulatedArm
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.driver import DriverError

TIMESTEP = 0.002  # s
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


class MujocoArm(SimulatedArm):
    """A simulated arm with nothing in front of it, which senses nothing beyond its joints."""

    world = None
    """A simulation: results of calibration are not kept."""

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
        inertia = np.zeros((self.model.nv, self.model.nv))
        mujoco.mj_fullM(self.model, self.data, inertia)
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
