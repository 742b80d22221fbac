"""Driver of an arm of Dynamixel or Feetech servos on one serial bus, SO-101 style.

A tick is one grouped read of all servos and one grouped write of their goals. Lost or corrupted
frames are requested again, a bounded number of times. Where a servo's answer is lost in spite of
that, what it measured before stands for it, and the whole measurement is as old as that; a goal
that is lost is sent again by the next tick. Torque is switched on at the measured pose and off only
by `release`: an arm without torque falls. A servo that has fallen silent is a fault and is not
waited for again before a reset: the others are braked at the full rate.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import numpy as np

from embodied.core.bounds import Bound, Count, Positive, Whole
from embodied.core.build import ConfigError
from embodied.real_robot.drivers.driver import Driver, Outside, RestDroop
from embodied.real_robot.drivers.servos.bus import (
    HIGHEST_ID,
    MAKES,
    TICKS,
    Motion,
    Registers,
    SerialPort,
    ServoWire,
)
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError

LEROBOT_TURN = 4095  # ticks that LeRobot counts as 360 degrees
SLACK = 23  # ticks (2 degrees) outside of a joint's calibrated range that are not yet a mistake
Ampere = Annotated[float, Bound(above=0.0, high=10.0)]


@dataclass(frozen=True)
class Joint:
    """A servo of the arm. A tick is 1/4096 of a turn."""

    name: str  # of the joint
    id: Annotated[int, Bound(0, HIGHEST_ID)]  # of the servo
    low: Whole  # lowest tick that calibration found to be reachable
    high: Whole  # highest tick that calibration found to be reachable
    zero: Whole = 2048  # tick where the joint is at 0 rad
    sign: Literal[-1, 1] = 1  # -1: the joint turns the other way than the servo
    ratio: Positive = 1.0  # turns of the servo for one of the joint
    torque: Annotated[float, Bound(0.0, 1e3)] = 0.0  # N m per A at the servo; 0: not measured


@dataclass(frozen=True)
class Hand:
    """The gripper's servo."""

    id: Annotated[int, Bound(0, HIGHEST_ID)]  # of the servo
    closed: Whole  # tick where it is closed
    open: Whole  # tick where it is open
    width: Annotated[float, Bound(above=0.0, high=1.0)]  # opening there, m
    force: Annotated[float, Bound(0.05, 1.0)] = 0.5  # largest share of the servo's torque
    strength: Annotated[float, Bound(above=0.0, high=1e3)] = 30.0  # N at all of that torque


@dataclass(frozen=True)
class Config:
    """Settings of an arm of servos on one serial bus. A Dynamixel stops by itself after `watchdog`;
    Feetech's servos have no watchdog, and hold their goal."""

    protocol: Literal["dynamixel", "feetech"]  # what the servos speak
    port: str  # /dev/serial/by-id/...
    joints: tuple[Joint, ...]  # servos of the arm, in the order of the limits
    hand: Hand | None = None  # servo of the gripper; null: none
    baud: Count = 1_000_000  # bits a second
    timeout: Annotated[float, Bound(above=0.0, high=10.0)] = 0.01  # s of one exchange
    retries: Annotated[int, Bound(0, 100)] = 3  # times that an exchange is asked again
    watchdog: Annotated[float, Bound(0.02, 2.54)] = 0.2  # s of silence, then a Dynamixel stops
    ampere: Ampere | None = None  # A per unit; null: 2.69e-3 (X), 6.5e-3 (STS3215); XL330: 1e-3
    units: Literal["degrees", "range"] = "degrees"  # how LeRobot counts joints; range: -100 to 100

    def __post_init__(self) -> None:
        ids = [joint.id for joint in self.joints] + [hand.id for hand in some(self.hand)]
        if not self.joints or len(set(ids)) < len(ids):
            raise ConfigError(f"servo ids {ids} should be different, from 0 to {HIGHEST_ID}")
        for joint in self.joints:
            if joint.low >= joint.high:
                raise ConfigError(f"joint {joint.name}: needs low < high")
        if any(hand.closed == hand.open for hand in some(self.hand)):
            raise ConfigError("hand: closed and open should differ")


def some(hand: Hand | None) -> tuple[Hand, ...]:
    """A tuple of the hand, empty without one."""
    return () if hand is None else (hand,)


class ServoBus(RestDroop, Driver):
    """Positions are rad at the joints. One wrong id, mode or pose refuses to connect."""

    falls_when_released = True

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.make = MAKES[config.protocol]
        self.grip = None if config.hand is None else 0.0
        self.joints = tuple(joint.name for joint in config.joints)
        names = {joint.id: f"joint {joint.name}" for joint in config.joints}
        names |= {hand.id: "the hand" for hand in some(config.hand)}
        self.ids = tuple(names)
        port = SerialPort(config.port, config.baud)
        self.wire = ServoWire(port, self.make, names, config.timeout, config.retries, clock)
        self._turns = np.array([joint.sign * joint.ratio for joint in config.joints])
        self._gain = self._turns * TICKS / math.tau  # ticks per rad
        self._zero = np.array([joint.zero for joint in config.joints], float)
        ampere = self.make.ampere if config.ampere is None else config.ampere
        self._torque = self._turns * [joint.torque * ampere for joint in config.joints]
        self.wire.limited = {hand.id: self.make.limits for hand in some(config.hand)}
        self._motion: dict[int, Motion] = {}
        self._heard: dict[int, float] = {}  # time (s) of each servo's newest motion
        self._droop = np.zeros(len(config.joints))
        self._connected = False

    def connect(self) -> None:
        self.wire.port.open()
        self._connected = True
        try:
            self.wire.silent.clear()
            self._find()
            self._limit_force()
            self._require(self._hold() or self._switch(self.ids, on=True))
        except DriverError:
            self.close()
            raise

    def read(self) -> ArmState:
        self._check_watchdog()
        now, heard = self.clock(), False
        try:
            heard = self._measured(self.wire.hear(*self.make.state), now)
            self.wire.check_silent()
            self.wire.check_faults()
        except DriverError as error:
            error.measured = self._state() if heard else None
            raise
        return self._state()

    def _measured(self, found: dict[int, bytes], now: float) -> bool:
        """Note what was `found` at `now` (s); whether any servo answered."""
        for id, data in found.items():
            self._motion[id] = self.make.motion(data)
            self._heard[id] = now
        return bool(found)

    def _state(self) -> ArmState:
        """The newest measurement, as old as the oldest of the servos that are not silent."""
        ids = [joint.id for joint in self.config.joints]
        living = [id for id in ids if id not in self.wire.silent]
        time_measured = min(self._heard[id] for id in living or ids)
        moved = [self._motion[joint.id] for joint in self.config.joints]
        position, velocity, current = (np.array(each, float) for each in zip(*moved, strict=True))
        q = (position - self._zero) / self._gain
        # Nothing models an arm's weight and friction: they count as external.
        torque = current * self._torque
        external = torque.copy() if self._torque.all() else None
        return ArmState(q, velocity / self._turns, torque, time_measured, external=external)

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
        for hand in some(self.config.hand):
            if not math.isfinite(width):
                raise DriverError(f"the hand was sent to {width}: the policy says no number")
            share = min(max(width / hand.width, 0.0), 1.0)
            tick = round(hand.closed + share * (hand.open - hand.closed))
            goals[hand.id] = self.make.encode(tick)
        self._check_watchdog()
        self.wire.send(self.make.codec.sync_write(self.make.goal, goals))

    def limit_hand(self, speed: float, force: float) -> None:
        """By the register that does not survive switching off: the other's memory wears."""
        for hand in some(self.config.hand):
            if hand.id not in self.wire.silent:
                self._put(hand.id, self.make.force(min(hand.force, force / hand.strength))[1])

    @property
    def width(self) -> float:
        hand = self.config.hand
        if hand is None or hand.id not in self._motion:
            return 0.0
        share = (self._motion[hand.id].position - hand.closed) / (hand.open - hand.closed)
        return min(max(share, 0.0), 1.0) * hand.width

    def outside(self) -> Outside:
        """LeRobot's names and units: degrees from the middle of the calibrated range, or -100 to
        100 over it; the hand from 0 to 100."""
        joints = self.config.joints
        middle = np.array([(joint.low + joint.high) / 2 for joint in joints])
        ticks = np.full(len(joints), LEROBOT_TURN / 360)  # of a unit
        if self.config.units == "range":
            ticks = np.array([(joint.high - joint.low) / 200 for joint in joints])
        hands = some(self.config.hand)
        return Outside(
            (*(f"{joint.name}.pos" for joint in joints), *("gripper.pos" for _ in hands)),
            (*((self._zero - middle) / ticks).tolist(), *(0.0 for _ in hands)),
            (*(ticks / self._gain).tolist(), *(hand.width / 100 for hand in hands)),
            len(joints),
        )

    def calibration(self) -> str:
        return json.dumps([asdict(joint) for joint in self.config.joints])

    def reach(self) -> tuple[Floats, Floats]:
        ends = [((j.low, j.high) if j.sign > 0 else (j.high, j.low)) for j in self.config.joints]
        low, high = (
            (np.array(each, float) - self._zero) / self._gain for each in zip(*ends, strict=True)
        )
        return low, high

    def release(self) -> None:
        """Torque off, except for the hand's: what it holds stays. A person supports the arm."""
        self._require(self._switch([joint.id for joint in self.config.joints], on=False))

    def engage(self) -> None:
        self._require(self._hold() or self._switch(self.ids, on=True))

    def recover(self) -> None:
        """Goals where the servos stand, and watchdogs awake: noise may have left some without."""
        self.wire.silent.clear()
        self._require(self._hold())

    def stop(self) -> None:
        if self._connected:
            with suppress(DriverError):  # a wire that is gone: the servos' watchdog has to act
                self._hold()
                self._switch(self.wire.living, on=True)

    def close(self) -> None:
        self._connected = False
        self.wire.port.close()

    def _find(self) -> None:
        """Everybody is there, turns to positions, and stands where it can."""
        self.wire.find_echo()
        modes = self.wire.get(self.make.mode, 1)
        self._measured(self.wire.get(*self.make.state), self.clock())
        self.wire.check_faults()
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

    def _switch(self, ids: Collection[int], on: bool) -> set[int]:
        """Torque; ids of the servos that cannot be told."""
        return self.wire.put(self.make.torque, dict.fromkeys(ids, bytes((on,))))

    def _limit_force(self) -> None:
        """Limit the hand's force. Registers that survive switching off are written only where
        they change: their memory wears."""
        for hand in some(self.config.hand):
            kept, lost = self.make.force(hand.force)
            differs = {
                address: data
                for address, data in kept.items()
                if self.wire.ask(address, len(data), (hand.id,)).get(hand.id) != data
            }
            if differs and self.make.lock is not None:
                self._require(self._switch((hand.id,), on=False))
                for registers in ({self.make.lock: b"\x00"}, differs, {self.make.lock: b"\x01"}):
                    self._put(hand.id, registers)
            self._put(hand.id, lost)

    def _put(self, id: int, registers: Registers) -> None:
        for address, data in registers.items():
            self._require(self.wire.put(address, {id: data}))

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
        found = wire.ask(*self.make.state, wire.living)
        goals = {id: self.make.encode(self._held(id, data)) for id, data in found.items()}
        failed = set(self.ids) - set(found)
        if watchdog is None:
            return failed | wire.put(self.make.goal, goals)
        beats = round(self.config.watchdog / self.make.beat)
        awake = dict.fromkeys(found, b"\x00")
        if found:  # at once after each other: what wakes up would go on to where it was sent before
            wire.send(self.make.codec.sync_write(watchdog, awake))
            wire.send(self.make.codec.sync_write(self.make.goal, goals))
        failed |= wire.put(watchdog, awake)
        failed |= wire.put(self.make.goal, goals)
        return failed | wire.put(watchdog, dict.fromkeys(found, bytes((beats,))))

    def _held(self, id: int, data: bytes) -> int:
        """The goal, in ticks, at which servo `id` stays where it is."""
        position = self.make.motion(data).position
        names = [joint.id for joint in self.config.joints]
        if id not in names:
            return position
        at = names.index(id)
        return round(position + self._droop[at] * self._gain[at])

    def _check_watchdog(self) -> None:
        """After a silence: a servo whose watchdog has tripped takes no goals, and says nothing."""
        silence = self.wire.silence
        if self.make.watchdog is None or silence < self.config.watchdog - self.make.beat:
            return
        for id, data in self.wire.ask(self.make.watchdog, 1, self.wire.living).items():
            if data[0] == 255:
                raise DriverError(
                    f"{self.wire.names[id]} (id {id}) stopped itself after {silence:.2f} s without "
                    "a word from here: see what kept the control process, then reset"
                )
