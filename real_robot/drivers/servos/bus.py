"""The wire to all servos of a bus: registers of two makes, a serial port, grouped reads and writes.

Addresses and units are from the control tables of the Dynamixel X series and of Feetech's STS3215,
little-endian. The port is a raw file descriptor, with reads that end at a deadline; exchanges are
repeated where noise destroyed a reply. In a tick that has to stay short: a servo that does not
answer in it may answer in the next one, and is silent after `PATIENCE` of them.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import termios
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from embodied.real_robot.drivers.servos.codecs import (
    DYNAMIXEL,
    FEETECH,
    Codec,
    Reply,
    signed,
    unsigned,
)
from embodied.real_robot.kernel.driver import DriverError

TICKS = 4096  # a turn
PATIENCE = 3  # ticks in a row without an answer, then a servo is silent


class Motion(NamedTuple):
    """Measured at the servo's own shaft: ticks, rad/s, and current in units of the register."""

    position: int
    velocity: float
    current: int


Registers = dict[int, bytes]
"""Bytes to write, by register."""


@dataclass(frozen=True)
class Make:
    """One make of servo. `state` is (address, bytes) of the block that `motion` understands; `mode`
    the register that holds one of `modes` where a goal is a position; `watchdog` counts `beat` s,
    reads 255 after a trip and is 0 where it is off; `faults` names the bits of register `errors`,
    or of a reply's error byte where there is none; `ampere`: A of one unit of current. `force` is
    what to write for a share of a servo's torque (0 to 1), by register: first what survives
    switching off (behind `lock`, if there is one), then what does not; `limits` are the bits of
    `faults` that such a servo limits by itself."""

    codec: Codec
    state: tuple[int, int]
    motion: Callable[[bytes], Motion]
    goal: int
    encode: Callable[[int], bytes]
    torque: int
    mode: int
    modes: tuple[int, ...]
    ampere: float
    faults: Mapping[int, str]
    errors: int | None
    watchdog: int | None
    force: Callable[[float], tuple[Registers, Registers]]
    lock: int | None = None
    limits: int = 0
    beat: float = 0.02


def _dynamixel(data: bytes) -> Motion:
    """Motion in registers from 126: current (2), velocity (4, 0.229 rpm), position (4)."""
    current, velocity, position = (
        int.from_bytes(part, "little", signed=True) for part in (data[:2], data[2:6], data[6:10])
    )
    return Motion(position, velocity * 0.229 * math.tau / 60, current)


def _feetech(data: bytes) -> Motion:
    """Motion in registers from 56: position (2), speed (2, ticks/s), ..., at 69 current (2)."""
    position, speed, current = (
        signed(int.from_bytes(data[at : at + 2], "little"), 15) for at in (0, 2, 13)
    )
    return Motion(position, speed * math.tau / TICKS, current)


def _feetech_force(share: float) -> tuple[Registers, Registers]:
    """Max_Torque_Limit (0.1%), Protection_Current (6.5 mA) and Overload_Torque (%: above it for
    some time, the servo yields to its Protective_Torque); Torque_Limit is the first in memory."""
    torque = round(1000 * share).to_bytes(2, "little")
    current = round(500 * share).to_bytes(2, "little")
    return {16: torque, 28: current, 36: bytes((25,))}, {48: torque}


MAKES: Mapping[str, Make] = {
    "dynamixel": Make(
        codec=DYNAMIXEL,
        state=(126, 10),
        motion=_dynamixel,
        goal=116,
        encode=lambda ticks: ticks.to_bytes(4, "little", signed=True),
        torque=64,
        mode=11,
        modes=(3, 4, 5),
        ampere=2.69e-3,
        faults={
            0: "input voltage",
            2: "overheating",
            3: "encoder",
            4: "electrical shock",
            5: "overload",
        },
        errors=70,
        watchdog=98,
        # Goal PWM: the motor's voltage, which is a torque where it stands still.
        force=lambda share: ({}, {100: round(885 * share).to_bytes(2, "little")}),
    ),
    "feetech": Make(
        codec=FEETECH,
        state=(56, 15),
        motion=_feetech,
        goal=42,
        encode=lambda ticks: unsigned(ticks, 15).to_bytes(2, "little"),
        torque=40,
        mode=33,
        modes=(0,),
        ampere=6.5e-3,
        faults={0: "input voltage", 1: "angle", 2: "overheating", 3: "current", 5: "overload"},
        errors=None,
        watchdog=None,
        force=_feetech_force,
        lock=55,
        limits=1 << 5,
    ),
}


CHUNK, OLD = 4096, 16  # bytes at once, and how often before a write
DEVICES = Path("/sys/bus/usb-serial/devices")


class SerialPort:
    """A serial port that one process owns. With `echo`, the adapter sends back what was written:
    as many bytes are dropped of what is read after a write."""

    def __init__(self, path: str, baud: int) -> None:
        self.path = path
        self.baud = baud
        self.echo = False
        self._file = -1
        self._skip = 0
        self._poll = select.poll()

    def open(self) -> None:
        """8 data bits, no parity, nothing interpreted. DriverError with what to look at."""
        speed = getattr(termios, f"B{self.baud}", None)
        if speed is None:
            raise DriverError(f"this system has no serial rate of {self.baud} baud")
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            settings = [0, 0, termios.CS8 | termios.CREAD | termios.CLOCAL, 0, speed, speed]
            controls = [b"\x00"] * len(termios.tcgetattr(self._file)[6])
            termios.tcsetattr(self._file, termios.TCSANOW, [*settings, controls])
            termios.tcflush(self._file, termios.TCIOFLUSH)
        except BlockingIOError as error:
            self.close()
            raise DriverError(f"{self.path} is in use by another process: stop that") from error
        except PermissionError as error:
            raise DriverError(
                f"{self.path} may not be opened: join its group (often 'dialout') and log in again"
            ) from error
        except (OSError, termios.error) as error:
            self.close()
            raise DriverError(
                f"{self.path} is no serial port that is there ({error.args[-1]}): "
                "check the cable, and the name with ls /dev/serial/by-id"
            ) from error
        self._poll.register(self._file, select.POLLIN)

    def write(self, data: bytes) -> None:
        """Write all of `data`, after dropping bytes that were not asked for. DriverError."""
        if self._file < 0:
            raise DriverError(f"{self.path} is not open: connect first")
        try:
            for _ in range(OLD):
                if not self._poll.poll(0):
                    break
                self._skip = max(0, self._skip - len(os.read(self._file, CHUNK)))
            sent = os.write(self._file, data)
        except OSError as error:
            raise self._gone(error) from error
        if sent < len(data):
            raise DriverError(f"{self.path} takes no more: the adapter hangs, plug it in again")
        self._skip += len(data) if self.echo else 0

    def read(self, deadline: float) -> bytes:
        """Read the bytes that have come, as soon as there are some; empty from `deadline` (s,
        monotonic) on. DriverError where the port is gone."""
        while (left := deadline - time.monotonic()) > 0:
            if not self._poll.poll(left * 1000):
                continue
            try:
                data = os.read(self._file, CHUNK)
            except OSError as error:
                raise self._gone(error) from error
            if not data:
                raise self._gone(EOFError("end of file"))
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            if len(data) > dropped:
                return data[dropped:]
        return b""

    def drain(self, quiet: float, most: float) -> None:
        """Drop what comes until nothing did for `quiet` s, for `most` s at the longest."""
        end = time.monotonic() + most
        while self.read(min(end, time.monotonic() + quiet)):
            pass
        self._skip = 0

    def latency(self) -> str:
        """The command to type where the adapter delays bytes by more than 1 ms; else empty."""
        file = DEVICES / Path(self.path).resolve().name / "latency_timer"
        if not file.exists() or int(file.read_text()) <= 1:
            return ""
        return f"; its adapter holds bytes back, type: echo 1 | sudo tee {file}"

    def close(self) -> None:
        """Safe to call twice."""
        if self._file >= 0:
            self._poll = select.poll()
            os.close(self._file)
            self._file = -1

    def _gone(self, error: Exception) -> DriverError:
        return DriverError(f"{self.path} is gone ({error.args[-1]}): check the cable to the servos")


class ServoWire:
    """`names` are those of all servos, by id. One exchange may take `timeout` s and is repeated up
    to `retries` times, so that every method returns or raises DriverError within a bound."""

    def __init__(
        self,
        port: SerialPort,
        make: Make,
        names: Mapping[int, str],
        timeout: float,
        retries: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.port = port
        self.make = make
        self.names = dict(names)
        self.timeout = timeout
        self.retries = retries
        self.clock = clock
        self.errors: dict[int, int] = {}
        """The error byte of every servo's last answer."""
        self.repeated = 0
        """Exchanges that had to be repeated."""
        self.silent: set[int] = set()
        """Who was asked in vain: they are not waited for again before `silent` is cleared."""
        self.unanswered = dict.fromkeys(names, 0)
        """Requests in a row that each servo did not answer."""
        self._missed = dict.fromkeys(names, 0)
        """Ticks in a row in which each servo did not answer."""
        self.limited: Mapping[int, int] = {}
        """Bits of `faults` that are none, by id: what that servo limits by itself."""
        self._last = 0.0

    @property
    def silence(self) -> float:
        """Seconds since something was sent."""
        return self.clock() - self._last

    def find_echo(self) -> None:
        """Whether the adapter sends back what is written: what comes first is then the request."""
        question = self.make.codec.read(min(self.names), self.make.mode, 1)
        self.port.echo = False
        seen = b""
        self.send(question)
        end = self.clock() + self.timeout
        while len(seen) < len(question) and (data := self.port.read(end)):
            seen += data
        self.port.echo = seen.startswith(question)
        self.port.drain(self.timeout / 4, self.timeout)

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting for a reply."""
        self.port.write(frame)
        self._last = self.clock()

    def ask(
        self, address: int, size: int, ids: Collection[int], within: float = math.inf
    ) -> dict[int, bytes]:
        """`size` bytes from register `address` on, of those of `ids` that answer. Nobody is asked
        again once `within` s are over."""
        found: dict[int, bytes] = {}
        missing = tuple(ids)
        end = self.clock() + within
        for attempt in range(self.retries + 1):
            if not missing or (attempt and self.clock() >= end):
                break
            self.repeated += attempt > 0
            self.send(self.make.codec.sync_read(address, size, missing))
            self._collect(missing, size, found)
            for id in missing:
                self.unanswered[id] = 0 if id in found else self.unanswered[id] + 1
            missing = tuple(id for id in missing if id not in found)
            if missing:  # what comes late is not to be taken for the next answer
                self.port.drain(self.timeout / 10, self.timeout)
        return found

    @property
    def living(self) -> tuple[int, ...]:
        """Ids of the servos that are not silent."""
        return tuple(id for id in self.names if id not in self.silent)

    def get(self, address: int, size: int) -> dict[int, bytes]:
        """Read the same block of every servo. DriverError where one does not answer."""
        found = self.ask(address, size, self.living)
        self.silent |= set(self.names) - set(found)
        self.check_silent()
        return found

    def hear(self, address: int, size: int) -> dict[int, bytes]:
        """Read the same block of the servos that answer within a tick: nobody is asked again after
        two time-outs. Those without an answer in `PATIENCE` ticks in a row are silent from now on.
        """
        living = self.living
        found = self.ask(address, size, living, within=2 * self.timeout)
        for id in living:
            self._missed[id] = 0 if id in found else self._missed[id] + 1
            if self._missed[id] == PATIENCE:
                self._missed[id] = 0
                self.silent.add(id)
        return found

    def check_silent(self) -> None:
        """DriverError for a servo that did not answer."""
        if self.silent:
            id = min(self.silent)
            raise DriverError(
                f"no answer from {self.names[id]} (id {id}) on {self.port.path}, asked "
                f"{self.unanswered[id]} times at {self.port.baud} baud: check its cable, power, "
                f"id and baud rate{self.port.latency()}"
            )

    def put(self, address: int, data: Mapping[int, bytes]) -> set[int]:
        """Write, read back, and write again where it is not there. Ids that did not take it."""
        wrong = set(data)
        for _ in range(self.retries + 1):
            if not wrong:
                break
            retry = {id: data[id] for id in sorted(wrong)}
            self.send(self.make.codec.sync_write(address, retry))
            found = self.ask(address, len(next(iter(retry.values()))), retry)
            wrong = {id for id in retry if found.get(id) != data[id]}
        return wrong

    def check_faults(self) -> None:
        """DriverError for a servo that reported a fault with its last answer."""
        for id, error in self.errors.items():
            if not error:
                continue
            bits, register = error, self.make.errors
            if register is not None:  # the error byte says no more than that there is one
                bits = self.ask(register, 1, (id,)).get(id, b"\x00")[0]
            bits &= ~self.limited.get(id, 0)
            if register is None and not bits:
                continue
            named = [text for bit, text in self.make.faults.items() if bits >> bit & 1]
            raise DriverError(
                f"{self.names[id]} (id {id}) reports {', '.join(named) or f'error {error}'}: check "
                "load, supply and temperature, then switch it off and on"
            )

    def _collect(self, ids: Sequence[int], size: int, found: dict[int, bytes]) -> None:
        """Good replies into `found`, until the last of `ids` has answered or time is up: servos
        answer in the order in which they were asked.

        A frame that is followed by anything but another one has lost a byte, and ends with a part
        of the next: one checksum of a byte in 256 fits all the same."""
        codec, end = self.make.codec, self.clock() + self.timeout
        buffer = bytearray()
        answers: dict[int, Reply] = {}
        newest: int | None = None  # whose answer it is after which nothing has come yet
        while ids[-1] not in answers and (data := self.port.read(end)):
            buffer += data
            if newest is not None and not codec.begins(buffer):
                answers.pop(newest, None)
            if len(buffer) >= len(codec.header):
                newest = None
            while (packet := codec.take(buffer)) is not None:
                reply = codec.reply(packet)
                if reply is None or reply.id not in ids or len(reply.data) != size:
                    continue
                if codec.begins(buffer):
                    newest = reply.id
                    answers[reply.id] = reply
        for id, reply in answers.items():
            found[id] = reply.data
            self.errors[id] = reply.error
