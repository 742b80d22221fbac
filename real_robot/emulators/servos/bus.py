"""Emulated servo bus on a pseudo-terminal: Dynamixel X and STS3215 registers, motion and faults.

A thread reads what a client writes to `path`, byte by byte as it arrives, and replies as servos
would. Motion is first order: a goal is approached with time constant `LAG`, at most at
`FASTEST`.
"""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from embodied.core.bounds import Bound, CountOrZero, Fraction, NonNegative
from embodied.core.build import ConfigError
from embodied.real_robot.drivers.servos import bus as wire
from embodied.real_robot.drivers.servos.bus import BROADCAST, Packet, signed, unsigned
from embodied.real_robot.emulators.process import Process, PtyDevice, answer, settings

LAG, FASTEST = 0.03, 6000.0  # s, ticks/s
SILENCE = 0.01  # s after which a frame that is still incomplete is none
OVERLOAD = 0x20
STIFF = 300.0  # ticks from its goal at which an STS3215 gives all its torque


@dataclass
class Faults:
    """Faults of an emulated wire."""

    flip: Fraction = 0.0  # share of frames with one wrong bit, both ways
    lose: Fraction = 0.0  # share of replies that never come
    drop: Fraction = 0.0  # share of bytes that are lost, both ways
    late: Fraction = 0.0  # share of replies that come late
    delay: Annotated[float, Bound(0.0, 60.0)] = 0.03  # s by which those are late
    split: Fraction = 0.0  # share of replies that come in two parts
    echo: bool = False  # whether what is written comes back first
    turnaround: Annotated[float, Bound(0.0, 60.0)] = 0.0  # s that a servo takes to reply
    baud: NonNegative = 0.0  # bits a second, so that frames take time; 0: they take none


class Servo(ABC):
    """Registers and motion of one; subclasses know where things are. `sag`: ticks by which gravity
    holds it below its goal; `wall`: a tick that something solid keeps it from going below; `moved`:
    the largest step (ticks) that torque has made at once."""

    codec: wire.Codec
    GOAL: int
    TORQUE: int

    def __init__(self, id: int, tick: float) -> None:
        self.id = id
        self.at = float(tick)
        self.speed = 0.0
        self.table = bytearray(256)
        self.then = self.heard = time.monotonic()
        self.alert: int = 0
        self.fastest = FASTEST
        self.sag = 0.0
        self.wall: float | None = None
        self.moved = 0.0

    @abstractmethod
    def goal(self) -> int: ...

    def target(self) -> float:
        """Where it turns to."""
        return self.goal()

    @abstractmethod
    def measure(self) -> None:
        """Position, speed and current into the table."""

    @abstractmethod
    def store(self, address: int, data: bytes) -> int:
        """An instruction to write; the error byte."""

    @abstractmethod
    def error(self) -> int:
        """The error byte of its answers."""

    def put(self, address: int, value: int, size: int = 2) -> None:
        """A number into the table."""
        self.table[address : address + size] = value.to_bytes(size, "little", signed=value < 0)

    def word(self, address: int) -> int:
        """A number of two bytes from the table."""
        return int.from_bytes(self.table[address : address + 2], "little")

    def move(self, now: float) -> None:
        dt = now - self.then
        self.then = now
        self.speed = 0.0
        if self.table[self.TORQUE] & 1 and dt > 0:
            step = (self.target() - self.sag - self.at) * (1 - math.exp(-dt / LAG))
            step = max(-self.fastest * dt, min(self.fastest * dt, step))
            if self.wall is not None:
                step = max(step, self.wall - self.at)
            self.at += step
            self.speed = step / dt
            self.moved = max(self.moved, abs(step))
        self.measure()


class DynamixelServo(Servo):
    codec, GOAL, TORQUE = wire.DYNAMIXEL, 116, 64

    def __init__(self, id: int, tick: float) -> None:
        super().__init__(id, tick)
        self.put(0, 1020)
        self.table[6], self.table[7], self.table[11] = 45, id, 3
        self.table[68] = 2
        self.held = 0.0

    def goal(self) -> int:
        return int.from_bytes(self.table[116:120], "little", signed=True)

    def target(self) -> float:
        return self.held if self.table[98] == 255 else self.goal()

    def move(self, now: float) -> None:
        """The watchdog trips first: from its moment on, the servo stays where it is. Its goal is
        kept, and what is cleared without a new one goes on to the old."""
        beats = self.table[98]
        due = self.heard + 0.02 * beats
        if 0 < beats < 255 and now > due:
            super().move(max(due, self.then))
            self.table[98] = 255
            self.held = self.at
        super().move(now)

    def measure(self) -> None:
        current = round(0.5 * (self.goal() - self.at)) if self.table[64] else 0
        velocity = round(self.speed / 4096 * 60 / 0.229)
        self.put(126, max(-1193, min(1193, current)))
        self.put(128, velocity, 4)
        self.put(132, round(self.at), 4)
        self.table[70] = self.alert

    def store(self, address: int, data: bytes) -> int:
        end = address + len(data)
        if end > len(self.table):
            return 0x07
        locked = address < 64 and self.table[64]
        stopped = self.table[98] == 255 and address < 120 and end > 100
        stopped |= self.table[98] == 255 and address == 98 and data != b"\x00"
        if locked or stopped or (address < 147 and end > 120):
            return 0x07
        self.table[address:end] = data
        return 0

    def error(self) -> int:
        return 0x80 if self.alert else 0


class FeetechServo(Servo):
    codec, GOAL, TORQUE = wire.FEETECH, 42, 40

    def __init__(self, id: int, tick: float) -> None:
        super().__init__(id, tick)
        self.table[5], self.table[55] = id, 1
        for address, value in ((3, 777), (16, 1000), (48, 1000), (28, 500)):
            self.put(address, value)
        self.table[34], self.table[35], self.table[36] = 20, 200, 80
        self.kept = 0  # how often its lasting memory was written
        self.overloaded = 0.0  # s

    @property
    def force(self) -> float:
        """The share of its torque that it presses with, within Torque_Limit, and Protective_Torque
        once it is overloaded."""
        limit = self.word(48) / 1000
        if self.alert & OVERLOAD:
            limit = min(limit, self.table[34] / 100)
        return min(limit, abs(self.goal() - self.at) / STIFF) if self.table[40] else 0.0

    def move(self, now: float) -> None:
        """Above Overload_Torque for Protection_Time (10 ms), it is overloaded until it is not."""
        dt = now - self.then
        super().move(now)
        if self.wall is None:
            return
        loaded = self.force > self.table[36] / 100 or bool(self.alert & OVERLOAD and self.force)
        self.overloaded = self.overloaded + dt if loaded else 0.0
        if self.overloaded > 0.01 * self.table[35]:
            self.alert |= OVERLOAD
        elif not loaded:
            self.alert &= ~OVERLOAD

    def goal(self) -> int:
        return signed(self.word(42), 15) + self.offset

    @property
    def offset(self) -> int:
        """Homing_Offset: positions are told, and goals taken, with it off (bit 11 is its sign)."""
        return signed(self.word(31), 11)

    def measure(self) -> None:
        current = round(0.1 * (self.goal() - self.at)) if self.table[40] else 0
        self.put(56, unsigned(round(self.at) - self.offset, 15))
        self.put(58, unsigned(round(self.speed), 15))
        self.put(69, unsigned(current, 15))
        self.table[65] = self.alert

    def store(self, address: int, data: bytes) -> int:
        """EEPROM keeps what it has while the lock is on, without a word."""
        end = address + len(data)
        if (address < 40 and self.table[55]) or end > 86 or 56 <= address < 71:
            return 0
        self.table[address:end] = data
        self.kept += address < 40
        return 0

    def error(self) -> int:
        return self.alert


MAKES = {"dynamixel": DynamixelServo, "feetech": FeetechServo}


class FakeBus(PtyDevice):
    """`ticks` [n] are where servos 1 to n stand at first. As a context: the thread and the wire."""

    pause = SILENCE

    def __init__(
        self, protocol: str, ticks: Sequence[float], faults: Faults | None = None, seed: int = 0
    ) -> None:
        make = MAKES[protocol]
        self.codec = make.codec
        self.servos = {id: make(id, tick) for id, tick in enumerate(ticks, 1)}
        self.faults = faults if faults is not None else Faults()
        self.random = random.Random(seed)
        self.gone: set[int] = set()  # ids that no longer answer or listen
        self.frames = 0
        self._buffer = bytearray()

    def clock(self) -> float:
        """Time (s) on the bus."""
        return time.monotonic()

    def turn(self, data: bytes) -> None:
        self._move()
        if data:
            self._hear(data)
        else:
            self._buffer.clear()  # after a silence, what is incomplete never was a frame

    def _hear(self, data: bytes) -> None:
        """What a client has written."""
        if self.faults.echo:
            self.send(data)
        self._buffer += self._spoil(data)
        while (packet := self.codec.take(self._buffer)) is not None:
            self.frames += 1
            self._obey(packet)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def _move(self) -> float:
        now = self.clock()
        for servo in self.servos.values():
            servo.move(now)
        return now

    def _obey(self, packet: Packet) -> None:
        now = self._move()
        for servo in self.servos.values():
            servo.heard = now
        if self.faults.turnaround:
            self._wait(self.faults.turnaround)
        data, two = packet.data, self.codec.width
        address, more = int.from_bytes(data[:two], "little"), data[two:]
        size = int.from_bytes(more[:two], "little")
        if packet.code == wire.PING and not data:
            about = bytes(self.servos[1].table[0:2]) + b"\x2d" if two == 2 else b""
            self._answer([packet.id] if packet.id != BROADCAST else list(self.servos), about)
        elif packet.code == wire.READ and len(more) == two:
            self._read([packet.id], address, size)
        elif packet.code == wire.SYNC_READ and len(more) > two:
            self._read(list(more[two:]), address, size)
        elif packet.code == wire.WRITE and more:
            if (servo := self._servo(packet.id)) is not None:
                self._answer([packet.id], b"", servo.store(address, more))
        elif packet.code == wire.SYNC_WRITE and len(more) > two:
            for k in range(two, len(more) - size, size + 1):
                if (servo := self._servo(more[k])) is not None:
                    servo.store(address, more[k + 1 : k + 1 + size])

    def _servo(self, id: int) -> Servo | None:
        return None if id in self.gone else self.servos.get(id)

    def _read(self, ids: list[int], address: int, size: int) -> None:
        for id in ids:
            if (servo := self._servo(id)) is not None and address + size <= len(servo.table):
                self._answer([id], bytes(servo.table[address : address + size]))

    def _answer(self, ids: list[int], data: bytes, error: int = 0) -> None:
        for id in ids:
            if (servo := self._servo(id)) is not None:
                self._say(self.codec.answer(id, error | servo.error(), data))

    def _say(self, frame: bytes) -> None:
        faults, chance = self.faults, self.random.random
        if faults.baud:
            self._wait(10 * len(frame) / faults.baud)
        if chance() < faults.lose:
            return
        if chance() < faults.late:
            self._wait(faults.delay)
        frame = self._spoil(frame)
        if chance() < faults.split and len(frame) > 1:
            cut = self.random.randrange(1, len(frame))
            self.send(frame[:cut])
            frame = frame[cut:]
            self._wait(0.001)
        self.send(frame)

    def _spoil(self, data: bytes) -> bytes:
        """`data` without the bytes that are lost, and maybe with a wrong bit."""
        out = bytearray(data)
        if self.random.random() < self.faults.flip:
            out[self.random.randrange(len(out))] ^= 1 << self.random.randrange(8)
        if self.faults.drop:
            out = bytearray(byte for byte in out if self.random.random() >= self.faults.drop)
        return bytes(out)


@dataclass(frozen=True)
class Config:
    """Settings of an emulated servo bus."""

    protocol: Literal["dynamixel", "feetech"]  # what the servos speak
    ticks: tuple[Annotated[float, Bound(0.0, 4095.0)], ...]  # where servos 1 to n stand at first
    faults: Faults | None = None  # faults of the wire; null: none
    seed: CountOrZero = 0  # of the faults

    def __post_init__(self) -> None:
        if not self.ticks:
            raise ConfigError("ticks: where each servo stands")


class ServoArm(Process):
    """`start` tells the driver its `port`."""

    def __init__(self, config: Config) -> None:
        super().__init__("embodied.real_robot.emulators.servos.bus", config, "servo arm")


def main() -> None:
    """Say where the wire is, and play the servos: they are where the clock says, never late."""
    config = settings(Config)
    with FakeBus(config.protocol, config.ticks, config.faults, config.seed) as bus:
        answer({"port": bus.path})


if __name__ == "__main__":
    main()
