"""Driver of an arm of Dynamixel or Feetech servos on one serial bus, SO-101 style.

A tick is one grouped read of all servos and one grouped write of their goals. Lost or corrupted
frames are requested again, a bounded number of times. Torque is switched on at the measured pose
and never off: an arm without torque falls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied.core.build import ConfigError
from real_robot.control.arm_state import ArmState, Floats
from real_robot.drivers.driver import Driver, DriverError
from real_robot.drivers.servos.bus import ServoWire
from real_robot.drivers.servos.packet import HIGHEST_ID
from real_robot.drivers.servos.registers import MAKES, TICKS, Motion
from real_robot.drivers.servos.serial_port import SerialPort

SLACK = 23  # ticks (2 degrees) outside of a joint's calibrated range that are not yet a mistake


@dataclass(frozen=True)
class Joint:
    """`zero`: tick where the joint is at 0 rad; `sign`: -1 where it turns the other way than the
    servo; `ratio`: turns of the servo for one of the joint; `low`, `high`: ticks that calibration
    found to be reachable; `torque`: N m at the servo's shaft per A (0: not known, not measured)."""

    name: str
    id: int
    low: int
    high: int
    zero: int = 2048
    sign: Literal[-1, 1] = 1
    ratio: float = 1.0
    torque: float = 0.0


@dataclass(frozen=True)
class Hand:
    """A gripper's servo: ticks where it is `closed` and `open`, and `width` (m) when it is open."""

    id: int
    closed: int
    open: int
    width: float


@dataclass(frozen=True)
class Config:
    """`timeout` (s) of one exchange, asked again up to `retries` times; `watchdog` (s) of silence
    after which a Dynamixel stops by itself (Feetech's servos have none, and hold their goal);
    `ampere`: A of one unit of measured current (None: 2.69 mA of an X servo, 6.5 mA of an STS3215;
    an XL330 has 1 mA)."""

    protocol: Literal["dynamixel", "feetech"]
    port: str
    joints: tuple[Joint, ...]
    hand: Hand | None = None
    baud: int = 1_000_000
    timeout: float = 0.01
    retries: int = 3
    watchdog: float = 0.2
    ampere: float | None = None

    def __post_init__(self) -> None:
        ids = [joint.id for joint in self.joints] + [hand.id for hand in _some(self.hand)]
        if (
            not self.joints
            or len(set(ids)) < len(ids)
            or not all(0 <= i <= HIGHEST_ID for i in ids)
        ):
            raise ConfigError(f"servo ids {ids} should be different, from 0 to {HIGHEST_ID}")
        for joint in self.joints:
            if not (joint.low < joint.high and joint.ratio > 0 and joint.torque >= 0):
                raise ConfigError(f"joint {joint.name}: needs low < high, ratio > 0, torque >= 0")
        if any(hand.closed == hand.open or hand.width <= 0 for hand in _some(self.hand)):
            raise ConfigError("hand: closed and open should differ, and width be above 0")
        if not (self.timeout > 0 and self.retries >= 0 and 0.02 <= self.watchdog <= 2.54):
            raise ConfigError("timeout should be above 0, watchdog from 0.02 to 2.54 s")


class ServoBus(Driver):
    """Positions are rad at the joints. One wrong id, mode or pose refuses to connect."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.clock, self.make = config, clock, MAKES[config.protocol]
        self.joints = tuple(joint.name for joint in config.joints)
        names = {joint.id: f"joint {joint.name}" for joint in config.joints}
        names |= {hand.id: "the hand" for hand in _some(config.hand)}
        self.ids = tuple(names)
        port = SerialPort(config.port, config.baud)
        self.wire = ServoWire(port, self.make, names, config.timeout, config.retries)
        self._turns = np.array([joint.sign * joint.ratio for joint in config.joints])
        self._gain = self._turns * TICKS / math.tau  # ticks per rad
        self._zero = np.array([joint.zero for joint in config.joints], float)
        ampere = self.make.ampere if config.ampere is None else config.ampere
        self._torque = self._turns * [joint.torque * ampere for joint in config.joints]
        self._motion: dict[int, Motion] = {}
        self._connected = False

    def connect(self) -> None:
        self.wire.port.open()
        self._connected = True
        try:
            self._find()
            torque = dict.fromkeys(self.ids, b"\x01")
            self._require(self._hold() or self.wire.put(self.make.torque, torque))
        except DriverError:
            self.close()
            raise

    def read(self) -> ArmState:
        self._check_watchdog()
        now = self.clock()
        self._measure()
        moved = [self._motion[joint.id] for joint in self.config.joints]
        position, velocity, current = (np.array(each, float) for each in zip(*moved, strict=True))
        q = (position - self._zero) / self._gain
        return ArmState(q, velocity / self._turns, current * self._torque, now)

    def write(self, q: Floats, width: float) -> None:
        ticks = np.rint(self._zero + q * self._gain)
        goals: dict[int, bytes] = {}
        for joint, tick in zip(self.config.joints, ticks, strict=True):
            if not joint.low - SLACK <= tick <= joint.high + SLACK:
                raise DriverError(
                    f"joint {joint.name} (id {joint.id}) was sent to tick {tick:.0f}, outside of "
                    f"its {joint.low} to {joint.high}: the limits do not fit its calibration"
                )
            goals[joint.id] = self.make.encode(int(tick))
        for hand in _some(self.config.hand):
            if not math.isfinite(width):
                raise DriverError(f"the hand was sent to {width}: the policy says no number")
            share = min(max(width / hand.width, 0.0), 1.0)
            tick = round(hand.closed + share * (hand.open - hand.closed))
            goals[hand.id] = self.make.encode(tick)
        self._check_watchdog()
        self.wire.send(self.make.sync_write(self.make.goal, goals))

    @property
    def width(self) -> float:
        hand = self.config.hand
        if hand is None or hand.id not in self._motion:
            return 0.0
        share = (self._motion[hand.id].position - hand.closed) / (hand.open - hand.closed)
        return min(max(share, 0.0), 1.0) * hand.width

    def reach(self) -> tuple[Floats, Floats]:
        ends = [((j.low, j.high) if j.sign > 0 else (j.high, j.low)) for j in self.config.joints]
        low, high = (
            (np.array(each, float) - self._zero) / self._gain for each in zip(*ends, strict=True)
        )
        return low, high

    def recover(self) -> None:
        """Goals where the servos stand, and watchdogs awake: noise may have left some without."""
        self._require(self._hold())

    def stop(self) -> None:
        if self._connected:
            with suppress(DriverError):  # a wire that is gone: the servos' watchdog has to act
                self._hold()

    def close(self) -> None:
        self._connected = False
        self.wire.port.close()

    def _find(self) -> None:
        """Everybody is there, turns to positions, and stands where it can."""
        self.wire.find_echo()
        modes = self.wire.get(self.make.mode, 1)
        self._measure()
        for id, name in self.wire.names.items():
            if modes[id][0] not in self.make.modes:
                raise DriverError(
                    f"{name} (id {id}) is in operating mode {modes[id][0]}, not in position mode: "
                    f"write one of {self.make.modes} to its register {self.make.mode}"
                )
        for joint in self.config.joints:
            tick = self._motion[joint.id].position
            if not joint.low - SLACK <= tick <= joint.high + SLACK:
                raise DriverError(
                    f"joint {joint.name} (id {joint.id}) stands at tick {tick}, outside of its "
                    f"{joint.low} to {joint.high}: move it by hand, or calibrate it again"
                )

    def _measure(self) -> None:
        for id, data in self.wire.get(*self.make.state).items():
            self._motion[id] = self.make.motion(data)
        self.wire.check_faults()

    def _require(self, silent: set[int]) -> None:
        """DriverError where there are servos that could not be told."""
        if silent:
            id = min(silent)
            raise DriverError(
                f"{self.wire.names[id]} (id {id}) does not take what is written to it: check "
                "its power and its error lamp, then switch it off and on"
            )

    def _hold(self) -> set[int]:
        """Goals to where the servos are, and the watchdog, if it has tripped, awake again. Ids of
        the servos that cannot be told."""
        wire, watchdog = self.wire, self.make.watchdog
        found = wire.ask(*self.make.state, self.ids)
        goals = {
            id: self.make.encode(self.make.motion(data).position) for id, data in found.items()
        }
        failed = set(self.ids) - set(found)
        if watchdog is None:
            return failed | wire.put(self.make.goal, goals)
        beats = round(self.config.watchdog / self.make.beat)
        awake = dict.fromkeys(found, b"\x00")
        if found:  # at once after each other: what wakes up would go on to where it was sent before
            wire.send(self.make.sync_write(watchdog, awake))
            wire.send(self.make.sync_write(self.make.goal, goals))
        failed |= wire.put(watchdog, awake)
        failed |= wire.put(self.make.goal, goals)
        return failed | wire.put(watchdog, dict.fromkeys(found, bytes((beats,))))

    def _check_watchdog(self) -> None:
        """After a silence: a servo whose watchdog has tripped takes no goals, and says nothing."""
        silence = self.wire.silence
        if self.make.watchdog is None or silence < self.config.watchdog - self.make.beat:
            return
        for id, data in self.wire.get(self.make.watchdog, 1).items():
            if data[0] == 255:
                raise DriverError(
                    f"{self.wire.names[id]} (id {id}) stopped itself after {silence:.2f} s without "
                    "a word from here: see what kept the control process, then reset"
                )


def _some(hand: Hand | None) -> tuple[Hand, ...]:
    return () if hand is None else (hand,)
