"""Servo bus: an arm of Dynamixel or Feetech servos on one serial wire, SO-101 style.

A tick is one grouped read of all servos and one grouped write of their goals. What is lost or
corrupted on the wire is asked for again, a bounded number of times. Torque is switched on at the
pose that was measured and never off: an arm that is let go of falls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied.core.build import ConfigError
from real_robot.arm import Arm, Floats
from real_robot.drivers.driver import Driver, DriverError
from real_robot.drivers.packet import HIGHEST_ID, Reply
from real_robot.drivers.serial_port import SerialPort
from real_robot.drivers.servo_registers import MAKES, TICKS, Motion

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
    after which a Dynamixel stops by itself (Feetech's servos have none, and hold their goal)."""

    protocol: Literal["dynamixel", "feetech"]
    port: str
    joints: tuple[Joint, ...]
    hand: Hand | None = None
    baud: int = 1_000_000
    timeout: float = 0.01
    retries: int = 3
    watchdog: float = 0.2

    def __post_init__(self) -> None:
        ids = [joint.id for joint in self.joints] + [hand.id for hand in _some(self.hand)]
        if not self.joints or len(set(ids)) < len(ids) or not all(0 <= i <= HIGHEST_ID for i in ids):
            raise ConfigError(f"servo ids {ids} should be different, from 0 to {HIGHEST_ID}")
        for joint in self.joints:
            if not (joint.low < joint.high and joint.ratio > 0 and joint.torque >= 0):
                raise ConfigError(f"joint {joint.name}: low < high, ratio > 0, torque >= 0 please")
        if any(hand.closed == hand.open or hand.width <= 0 for hand in _some(self.hand)):
            raise ConfigError("hand: closed and open should differ, and width be above 0")
        if not (self.timeout > 0 and self.retries >= 0 and 0.02 <= self.watchdog <= 2.54):
            raise ConfigError("timeout should be above 0, watchdog from 0.02 to 2.54 s")


class ServoBus(Driver):
    """Positions are rad at the joints. One wrong id, mode or pose refuses to connect."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.clock, self.make = config, clock, MAKES[config.protocol]
        self.joints = tuple(joint.name for joint in config.joints)
        self.names = {joint.id: f"joint {joint.name}" for joint in config.joints}
        self.names |= {hand.id: "the hand" for hand in _some(config.hand)}
        self.ids = tuple(self.names)
        ticks = np.array([joint.sign * joint.ratio for joint in config.joints])
        self._gain = ticks * TICKS / math.tau  # ticks per rad
        self._turns = ticks
        self._zero = np.array([joint.zero for joint in config.joints], float)
        self._torque = ticks * [joint.torque for joint in config.joints]
        self.port = SerialPort(config.port, config.baud)
        self.repeated = 0  # exchanges that had to be repeated
        self._motion: dict[int, Motion] = {}
        self._errors: dict[int, int] = {}  # the error byte of every servo's last answer
        self._connected, self._last = False, 0.0

    def connect(self) -> None:
        self.port.open()
        self._connected = True
        try:
            self._find()
            torque = dict.fromkeys(self.ids, b"\x01")
            if silent := self._hold() or self._put(self.make.torque, torque):
                id = min(silent)
                raise DriverError(
                    f"{self.names[id]} (id {id}) does not take what is written to it: check its "
                    "power and its error lamp, then switch it off and on"
                )
        except DriverError:
            self.close()
            raise

    def read(self) -> Arm:
        self._check_watchdog()
        now = self.clock()
        self._measure()
        self._check_faults()
        moved = [self._motion[joint.id] for joint in self.config.joints]
        position, velocity, current = (np.array(each, float) for each in zip(*moved, strict=True))
        q = (position - self._zero) / self._gain
        return Arm(q, velocity / self._turns, current * self._torque, now)

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
            share = min(max(width / hand.width, 0.0), 1.0)
            tick = round(hand.closed + share * (hand.open - hand.closed))
            goals[hand.id] = self.make.encode(tick)
        self._check_watchdog()
        self._send(self.make.sync_write(self.make.goal, goals))

    @property
    def width(self) -> float:
        hand = self.config.hand
        if hand is None or hand.id not in self._motion:
            return 0.0
        share = (self._motion[hand.id].position - hand.closed) / (hand.open - hand.closed)
        return min(max(share, 0.0), 1.0) * hand.width

    def stop(self) -> None:
        if self._connected:
            with suppress(DriverError):  # a wire that is gone: the servos' watchdog has to act
                self._hold()

    def close(self) -> None:
        self._connected = False
        self.port.close()

    def _find(self) -> None:
        """Everybody is there, turns to positions, and stands where it can."""
        self._find_echo()
        modes = self._get(self.make.mode, 1)
        self._measure()
        self._check_faults()
        for id, name in self.names.items():
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

    def _find_echo(self) -> None:
        """Whether the adapter sends back what is written: what comes first is then the request."""
        question = self.make.read(self.ids[0], self.make.mode, 1)
        self.port.echo, seen = False, b""
        self._send(question)
        end = time.monotonic() + self.config.timeout
        while len(seen) < len(question) and (data := self.port.read(end)):
            seen += data
        self.port.echo = seen.startswith(question)
        self.port.drain(self.config.timeout / 4, self.config.timeout)

    def _hold(self) -> set[int]:
        """Goals to where the servos are, and the watchdog, if it has tripped, awake again. Ids of
        the servos that cannot be told."""
        watchdog, beats = self.make.watchdog, round(self.config.watchdog / self.make.beat)
        if watchdog is not None:
            self._put(watchdog, dict.fromkeys(self.ids, b"\x00"))
        found = self._ask(*self.make.state)
        self._motion |= {id: self.make.motion(data) for id, data in found.items()}
        silent = set(self.ids) - set(found)
        silent |= self._put(
            self.make.goal, {id: self.make.encode(self._motion[id].position) for id in found}
        )
        if watchdog is not None:
            silent |= self._put(watchdog, dict.fromkeys(self.ids, bytes((beats,))))
        return silent

    def _check_watchdog(self) -> None:
        """After a silence: a servo whose watchdog has tripped takes no goals, and says nothing."""
        silence = time.monotonic() - self._last
        if self.make.watchdog is None or silence < self.config.watchdog - self.make.beat:
            return
        for id, data in self._get(self.make.watchdog, 1).items():
            if data[0] == 255:
                raise DriverError(
                    f"{self.names[id]} (id {id}) stopped itself after {silence:.2f} s without a "
                    "word from here: see what kept the control process, then reset"
                )

    def _measure(self) -> None:
        for id, data in self._get(*self.make.state).items():
            self._motion[id] = self.make.motion(data)

    def _put(self, address: int, data: Mapping[int, bytes]) -> set[int]:
        """Write, read back, and again where it is not there. Ids of those that did not take it."""
        wrong = set(data)
        for _ in range(self.config.retries + 1 if data else 0):
            self._send(self.make.sync_write(address, {id: data[id] for id in sorted(wrong)}))
            found = self._ask(address, len(next(iter(data.values()))))
            wrong = {id for id in data if found.get(id) != data[id]}
            if not wrong:
                break
        return wrong

    def _get(self, address: int, size: int) -> dict[int, bytes]:
        """These bytes of every servo. DriverError where one does not answer."""
        found = self._ask(address, size)
        for id in self.ids:
            if id not in found:
                raise DriverError(
                    f"no answer from {self.names[id]} (id {id}) on {self.config.port}, asked "
                    f"{self.config.retries + 1} times at {self.config.baud} baud: check its "
                    "cable, power, id and baud rate"
                )
        return found

    def _ask(self, address: int, size: int) -> dict[int, bytes]:
        """These bytes of every servo that answers; asked again where no good answer came."""
        found: dict[int, bytes] = {}
        missing = self.ids
        for attempt in range(self.config.retries + 1):
            self.repeated += attempt > 0
            self._send(self.make.sync_read(address, size, missing))
            self._collect(missing, size, found)
            missing = tuple(id for id in self.ids if id not in found)
            if not missing:
                break
            self.port.drain(self.config.timeout / 10, self.config.timeout)
        return found

    def _collect(self, ids: Sequence[int], size: int, found: dict[int, bytes]) -> None:
        """Good replies into `found` until all of `ids` are there or time is up."""
        buffer, end = bytearray(), time.monotonic() + self.config.timeout
        while data := self.port.read(end):
            buffer += data
            while (packet := self.make.take(buffer)) is not None:
                reply = self.make.reply(packet)
                if reply is not None and reply.id in ids and len(reply.data) == size:
                    found[reply.id] = reply.data
                    self._errors[reply.id] = reply.error
            if all(id in found for id in ids):
                return

    def _check_faults(self) -> None:
        """DriverError for a servo that reported a fault with its last answer."""
        for id, error in self._errors.items():
            if not error:
                continue
            bits, register = error, self.make.errors
            if register is not None:
                bits = self._ask(register, 1).get(id, b"\x00")[0]
            named = [text for bit, text in self.make.faults.items() if bits >> bit & 1]
            raise DriverError(
                f"{self.names[id]} (id {id}) reports {', '.join(named) or f'error {error}'}: check "
                "load, supply and temperature, then switch it off and on"
            )

    def _send(self, frame: bytes) -> None:
        self.port.write(frame)
        self._last = time.monotonic()


def _some(hand: Hand | None) -> tuple[Hand, ...]:
    return () if hand is None else (hand,)
