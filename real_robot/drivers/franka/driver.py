"""Driver of a Franka Research 3 and its hand through libfranka, impedance control at 1 kHz in C++.

The driver sends a reference that the running controller picks up within a millisecond: springs on
the joints or on the tool, on top of the arm's own gravity compensation. Nothing starts without
collision thresholds and a payload. What stops the arm itself (a reflex, the user stop, lost
packets) is reported in one line and cleared only by an operator's reset.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from embodied.core.bounds import Bound, Number
from embodied.core.build import ConfigError, Node, build
from embodied.embodiments import fr3
from embodied.real_robot.control.arm_state import ArmState, Floats, Limits
from embodied.real_robot.drivers.driver import Driver, DriverError, Wait
from embodied.real_robot.drivers.franka.errors import FAILED, MODES, call, explain, franky, sever
from embodied.real_robot.drivers.franka.gripper import Config as HandConfig
from embodied.real_robot.drivers.franka.gripper import Hand
from embodied.real_robot.drivers.franka.impedance import JointSpring, Own, ToolSpring, misfit, own
from embodied.real_robot.drivers.springs import Gain, Springs, Tool, check_stiffness, span
from embodied.real_robot.ipc.external_state import ExternalStateReader

STOP = 1.0  # s that ending the controller may take
HIGHEST_FORCE = 300.0  # N (and N m): a threshold above that is none
Torque = Annotated[float, Bound(above=0.0, high=87.0)]
Force = Annotated[float, Bound(above=0.0, high=HIGHEST_FORCE)]
Seven = tuple[Torque, Torque, Torque, Torque, Torque, Torque, Torque]
Six = tuple[Force, Force, Force, Force, Force, Force]
Gains = tuple[Gain, Gain, Gain, Gain, Gain, Gain, Gain]
Inertia = tuple[Number, Number, Number, Number, Number, Number, Number, Number, Number]


@dataclass(frozen=True)
class Payload:
    """What is mounted or held besides the hand that Desk knows."""

    mass: Annotated[float, Bound(0.0, 3.0)]  # kg
    center: tuple[Number, Number, Number]  # m, in the flange's frame
    inertia: Inertia  # kg m^2, 3 x 3 column by column

    def __post_init__(self) -> None:
        if not 0 <= self.mass <= 3:
            raise ConfigError("payload.mass is from 0 to 3 kg")


@dataclass(frozen=True)
class Config:
    """Settings of a Franka. Thresholds and payload have no default: only you know them.

    The pull of the springs is bounded by `push`, because torques may change by 1 N m/ms and a
    stronger pull swings up. `senses` is a node of `embodied.real_robot.ipc.external_state`."""

    host: str  # address of the arm
    contact_torque: Seven  # N m of each joint above which a contact is reported
    collision_torque: Seven  # N m of each joint above which the arm stops itself
    contact_force: Six  # N (x, y, z), N m (roll, pitch, yaw) of the tool: contact is reported
    collision_force: Six  # N, N m of the tool above which the arm stops itself
    payload: Payload  # what is mounted or held
    stiffness: Gains = (600.0, 600.0, 600.0, 600.0, 250.0, 150.0, 50.0)  # N m/rad of each joint
    damping: Gains = (50.0, 50.0, 50.0, 50.0, 30.0, 25.0, 15.0)  # N m s/rad of each joint
    push: Gains = (45.0, 45.0, 45.0, 45.0, 11.0, 11.0, 9.0)  # largest pull of a spring, N m
    tool: Tool | None = None  # springs on the tool's pose; null: on the joints
    hand: HandConfig | None = None  # the hand; null: none
    realtime: bool = True  # false: do without a real-time kernel
    silence: Wait = 0.1  # s without news after which the arm is lost
    patience: Wait = 10.0  # s for what is asked before anything moves
    senses: Node | None = None  # what measures the things before the arm; null: nothing

    def __post_init__(self) -> None:
        pairs = [
            (self.contact_torque, self.collision_torque, fr3.TORQUE),
            (self.contact_force, self.collision_force, np.full(6, HIGHEST_FORCE)),
        ]
        for contact, collision, most in pairs:
            low, high = np.asarray(contact), np.asarray(collision)
            if not (len(low) == len(high) == len(most)):
                raise ConfigError("thresholds are 7 torques (joints) and 6 forces (the tool)")
            if not ((low > 0) & (low <= high) & (high <= most)).all():
                raise ConfigError(
                    "thresholds should be 0 < contact <= collision <= the joint's torque limit "
                    f"({fr3.TORQUE.tolist()} N m), or {HIGHEST_FORCE:.0f} N"
                )
        gains = np.array([self.stiffness, self.damping, self.push], float)
        if gains.shape != (3, 7) or not ((gains > 0) & (gains <= 3000)).all():
            raise ConfigError("stiffness, damping, push: 7 numbers each, above 0, up to 3000")
        if not (self.silence > 0 and self.patience > 0):
            raise ConfigError("silence and patience should be above 0 s")


class Franka(Driver):
    """Holds the pose by its own impedance from `connect` to `close`; then the arm's own brakes and
    position controller do."""

    joints = fr3.JOINTS

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.senses = None if config.senses is None else build(config.senses, ExternalStateReader)
        self.sensed = () if self.senses is None else self.senses.names
        self._robot: Any = None
        self._motion: Any = None
        self._hand: Hand | None = None
        self._own: Own | None = None
        self._lost = ""
        self._silent = False
        self._q, self._things = np.zeros(7), np.zeros(len(self.sensed))
        gains = (np.array(each) for each in (config.stiffness, config.damping, config.push))
        self._spring = JointSpring(*gains) if config.tool is None else ToolSpring(config.tool)
        self._tick = -1
        self._seen = 0.0

    def connect(self) -> None:
        self._connect(recover=False)

    def recover(self) -> None:
        """Connect anew, and use the arm's own error recovery; what still runs is left alone."""
        # No name for the robot here: what has one is not let go of, and it takes one connection.
        runs = self._robot is not None and not self._lost and bool(self._robot.is_in_control)
        if not runs or (self._hand is not None and self._hand.fault):
            self.close()
            self._connect(recover=True)

    def _connect(self, recover: bool) -> None:
        config = self.config
        kernel = franky.RealtimeConfig.Enforce if config.realtime else franky.RealtimeConfig.Ignore

        def dial() -> Any:
            return franky.Robot(config.host, realtime_config=kernel)

        try:
            if self.senses is not None:
                self.senses.connect()
            self._robot = call(config.host, dial, config.patience, "answer")
            self._check_mode(recover)
            self._own = self._limits()
            if config.hand is not None:
                self._hand = Hand(config.hand, config.host, config.patience)
            call(config.host, self._set_up, config.patience, "take its settings")
            call(config.host, self._hold, config.patience, "take control")
        except DriverError:
            self.close()
            raise

    def check(self, limits: Limits) -> None:
        assert self._own is not None
        if reason := misfit(limits, self._own):
            raise DriverError(f"the Franka at {self.config.host}: {reason}")

    def read(self) -> ArmState:
        robot = self._controlled()
        try:
            state = robot.state
        except FAILED as error:
            raise self._fail(error) from error
        now, tick = self.clock(), state.time.to_msec()
        if tick != self._tick:
            self._tick = tick
            self._seen = now
            self._silent = False
        elif now - self._seen > self.config.silence:
            self._silent = True
            raise DriverError(
                f"the Franka at {self.config.host} has said nothing for {now - self._seen:.2f} s: "
                "look at its power, cable and Desk, then reset"
            )
        if self._hand is not None and self._hand.fault:
            raise DriverError(self._hand.fault)
        if self.senses is not None:
            self._things = self.senses.read()
        self._q = np.array(state.q)
        return ArmState(self._q, np.array(state.dq), np.array(state.tau_J), self._seen)

    def write(self, q: Floats, width: float) -> None:
        self._controlled()
        own = self._own
        assert own is not None
        if not ((q >= own.low) & (q <= own.high)).all() or not np.isfinite(width):
            raise DriverError(
                f"the Franka at {self.config.host} was sent to {np.round(q, 3).tolist()}, {width}: "
                "outside of its own limits"
            )
        self._motion.set_reference(self._spring.reference(q, self._q))
        if self._hand is not None:
            self._hand.wish = width

    def release(self) -> None:
        """Let the arm's own gravity compensation carry it, with a little damping."""
        self._controlled()
        self._spring.release(self._motion)

    def engage(self) -> None:
        here = np.array(self._controlled().state.q)
        self._spring.engage(self._motion, here)

    @property
    def springs(self) -> Springs | None:
        return self._spring.springs

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        return span(self._spring.springs)

    def stiffen(self, stiffness: Floats) -> None:
        self._controlled()
        check_stiffness(stiffness, self.stiffness, f"the Franka at {self.config.host}")
        self._motion.set_gains(self._spring.gains(stiffness))

    @property
    def width(self) -> float:
        return self._hand.width if self._hand is not None else 0.0

    def sense(self) -> Floats:
        return self._things

    def renew(self) -> None:
        if self.senses is not None:
            self.senses.renew()

    def stop(self) -> None:
        if self._robot is None or self._lost:
            return
        try:
            if self._robot.is_in_control:
                here = np.array(self._robot.state.q)
                self._spring.engage(self._motion, here)
        except FAILED as error:
            self._fail(error)

    def close(self) -> None:
        if self._silent or "Timeout" in self._lost:
            sever(self.config.host)
        if self._hand is not None:
            self._hand.close()
        if self._robot is not None and not (self._lost or self._silent):
            try:
                if self._robot.is_in_control:
                    self._robot.move(franky.TorqueStopMotion(), asynchronous=True)
                    self._robot.join_motion(STOP)
            except FAILED as error:
                self._fail(error)
        self._robot = self._motion = self._hand = None
        self._lost = ""
        self._silent = False
        self._tick = -1

    def _limits(self) -> Own:
        try:
            return own(self._robot.model_urdf)
        except ValueError as error:
            raise DriverError(f"the Franka at {self.config.host}: {error}") from error

    def _check_mode(self, recover: bool) -> None:
        host, patience = self.config.host, self.config.patience
        state = call(host, lambda: self._robot.state, patience, "tell its state")
        if recover and state.robot_mode.name == "Reflex":
            call(host, self._robot.recover_from_errors, patience, "recover from its error")
            state = call(host, lambda: self._robot.state, patience, "tell its state")
        self._q = np.array(state.q)
        mode = state.robot_mode.name
        if mode in MODES:
            said = str(state.current_errors or state.last_motion_errors)
            errors = f" {said}" if mode == "Reflex" else ""
            raise DriverError(f"the Franka at {host} is not ready: {MODES[mode]}{errors}")

    def _set_up(self) -> bool:
        config, load = self.config, self.config.payload
        self._robot.set_collision_behavior(
            list(config.contact_torque),
            list(config.collision_torque),
            list(config.contact_force),
            list(config.collision_force),
        )
        self._robot.set_load(load.mass, list(load.center), list(load.inertia))
        return True

    def _hold(self) -> bool:
        """The controller, at where the arm is."""
        assert self._own is not None
        motion = self._spring.motion(self._robot, self._own, self._q)
        self._robot.move(motion, asynchronous=True)
        self._motion = motion
        return True

    def _controlled(self) -> Any:
        """The robot, while our controller runs on it; DriverError with why it does not."""
        robot = self._robot
        if robot is None:
            raise DriverError(f"the Franka at {self.config.host} is not connected")
        if self._lost:
            raise DriverError(self._lost)
        if robot.is_in_control:
            return robot
        try:
            robot.poll_motion()
        except FAILED as error:
            raise self._fail(error) from error
        raise self._fail("its controller has ended")

    def _fail(self, said: object) -> DriverError:
        """Remember why: asking a robot that is gone takes a second each time."""
        self._lost = self._lost or explain(self.config.host, said)
        return DriverError(self._lost)
