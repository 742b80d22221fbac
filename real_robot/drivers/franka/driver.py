"""Driver of a Franka Research 3 and its hand through libfranka, impedance control at 1 kHz in C++.

The driver sends a reference that the running controller picks up within a millisecond: springs on
the joints or on the tool, on top of the arm's own gravity compensation. Nothing starts without
collision thresholds and a payload. What stops the arm itself (a reflex, the user stop, lost
packets) is reported in one line and cleared only by an operator's reset.

The hand takes one command at a time, and is made to follow a changing target width. A target that
leaves the measured width starts a motion to the end of that direction. Closing is a grasp with
force, so that a held object stays held. A hand that reaches its target before the end is stopped
there, and so is one that closes or grasps with more force than it may any more: that ends its
force. Commands take up to a second and run in threads of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from embodied.core.bounds import Bound, Number
from embodied.core.build import ConfigError, Node, build
from embodied.embodiments import fr3
from embodied.real_robot.drivers.driver import Driver, Gain, Tool, Wait, check_stiffness, span
from embodied.real_robot.drivers.franka.library import (
    FAILED,
    MODES,
    JointSpring,
    Own,
    ToolSpring,
    call,
    explain,
    franky,
    misfit,
    own,
    sever,
)
from embodied.real_robot.ipc.external_state import ExternalStateReader
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.driver import DriverError, Springs, StopCategory

BAND = 0.004  # m off the wish that set the hand in motion
LATENCY = 0.03  # s that a stop needs
PAUSE = 0.02  # s between two looks
OPEN, CLOSE, STILL = "open", "close", "still"
HALT = 0.5  # s that the arm has to answer a stop of its motion
LEAST_FORCE = 10.0  # N of a grasp


@dataclass(frozen=True)
class HandConfig:
    """Settings of a Franka's hand."""

    speed: Annotated[float, Bound(above=0.0, high=0.2)]  # m/s of its opening
    force: Annotated[float, Bound(above=0.0, high=140.0)]  # N to hold things with; 70 continuously


class Hand:
    """`wish` (m) may be set at any time; `width` (m) is what was measured last; `fault` says what
    failed, empty while nothing did."""

    def __init__(self, config: HandConfig, host: str, patience: float) -> None:
        self.config = config
        self.host = host
        self._gripper: Any = call(host, lambda: franky.Gripper(host), patience, "find its hand")
        state = call(host, lambda: self._gripper.state, patience, "tell its hand's width")
        self.most: float = state.max_width
        if self.most < 2 * BAND:
            raise DriverError(f"the hand of the Franka at {host} says it cannot open: home it")
        self.width = self.wish = float(state.width)
        self.fault = ""
        self._speed = config.speed
        self._force = config.force
        self._too_strong = False
        self._going = STILL
        self._number = 0
        self._busy = False
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def limit(self, speed: float, force: float) -> None:
        """Move and grasp with at most `speed` (m/s) and `force` (N), or what the settings say."""
        force = min(force, self.config.force)
        self._too_strong = self._too_strong or force < self._force
        self._speed = min(speed, self.config.speed)
        self._force = force

    def close(self) -> None:
        """End a motion that runs; a hand that holds something keeps it."""
        self._end.set()
        self._watcher.join(1.5)  # a look at a hand that is gone ends after a second
        if self._busy and not (self.fault or self._watcher.is_alive()):
            with suppress(*FAILED):
                self._halt()

    def _watch(self) -> None:
        try:
            while not self._end.wait(PAUSE):
                self.width = float(self._gripper.state.width)
                if self._too_strong:
                    self._too_strong = False  # before the hand is: it may be set again meanwhile
                    if self._going == CLOSE:
                        self._halt()
                self._follow(min(max(self.wish, 0.0), self.most) - self.width)
        except FAILED as error:
            self._failed(error)

    def _follow(self, off: float) -> None:
        """`off` (m): how much wider it is wanted."""
        speed = self._speed
        most = self.most
        left = off if self._going == OPEN else -off
        before_end = BAND < self.wish < most - BAND
        if off < -BAND and self._going != CLOSE:
            # Close until something is between the pads, or nothing: both are fine
            grasp = (0.0, speed, self._force, most, most)
            self._go(CLOSE, lambda: self._gripper.grasp(*grasp))
        elif off > BAND and self._going != OPEN:
            self._go(OPEN, lambda: self._gripper.move(most, speed))
        elif self._busy and before_end and left <= speed * LATENCY:
            self._halt()

    def _go(self, way: str, do: Callable[[], bool]) -> None:
        if self._busy:
            self._halt()
        self._going = way
        self._busy = True
        self._number += 1
        number = self._number

        def run() -> None:
            try:
                do()
            except FAILED as error:
                if number == self._number and not self._end.is_set():
                    self._failed(error)
            if number == self._number:
                self._busy = False

        threading.Thread(target=run, daemon=True).start()

    def _halt(self) -> None:
        """End the motion that runs; its later answers are ignored."""
        self._number += 1
        self._going = STILL
        self._busy = False
        self._gripper.stop()

    def _failed(self, error: BaseException) -> None:
        self.fault = explain(self.host, f"hand: {error}")


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


class Franka(Driver):
    """Holds the pose by its own impedance from `connect` to `close`; then the arm's own brakes and
    position controller do."""

    joints = fr3.JOINTS

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.senses = None if config.senses is None else build(config.senses, ExternalStateReader)
        self.sensed = () if self.senses is None else self.senses.names
        self.grip = None if config.hand is None else LEAST_FORCE
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
            try:
                self._own = own(self._robot.model_urdf)
            except ValueError as error:
                raise DriverError(f"the Franka at {config.host}: {error}") from error
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
        force = np.array(state.O_F_ext_hat_K)[:3]
        return ArmState(self._q, np.array(state.dq), np.array(state.tau_J), self._seen, force)

    def write(self, q: Floats, width: float) -> None:
        if self._hand is not None and np.isfinite(width):
            self._hand.wish = width  # also where the arm has stopped itself
        self._controlled()
        own = self._own
        assert own is not None
        if not ((q >= own.low) & (q <= own.high)).all() or not np.isfinite(width):
            raise DriverError(
                f"the Franka at {self.config.host} was sent to {np.round(q, 3).tolist()}, {width}: "
                "outside of its own limits"
            )
        self._motion.set_reference(self._spring.reference(q, self._q))

    def limit_hand(self, speed: float, force: float) -> None:
        if self._hand is not None:
            self._hand.limit(speed, force)

    def release(self) -> None:
        """Let the arm's own gravity compensation carry it, with a little damping."""
        self._controlled()
        self._spring.release(self._motion)

    def engage(self) -> None:
        self._spring.engage(self._motion, np.array(self._controlled().state.q))

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
                self._spring.engage(self._motion, np.array(self._robot.state.q))
        except FAILED as error:
            self._fail(error)

    def halt(self) -> StopCategory:
        """libfranka's stop: the arm's own controller breaks the motion off and holds it (category
        2). On a wire that is gone, the arm stops itself."""
        robot = self._robot
        if robot is not None and not (self._lost or self._silent):
            with suppress(DriverError):
                call(self.config.host, robot.stop, HALT, "stop")
        return StopCategory.HELD

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
