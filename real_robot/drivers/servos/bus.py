"""The wire to all servos of a bus: frames of two protocols, registers of two makes, a serial port,
grouped reads and writes.

Dynamixel, protocol 2.0 (Robotis e-manual, protocol 2.0):

    FF FF FD 00 | id | length (2) | instruction | data ... | CRC (2)

`length` counts what follows it. Inside, FF FF FD is sent as FF FF FD FD, so that a header never
occurs in data. The CRC (x^16 + x^15 + x^2 + 1, from 0, high bit first) covers all bytes before it.
Numbers are little-endian.

Feetech, STS and SMS servos (Feetech's communication protocol manual):

    FF FF | id | length | instruction, or error in a reply | data ... | checksum

`length` counts what follows it; the checksum is the complement of the sum of all after FF FF.
Addresses are one byte, numbers little-endian, and signed ones sign and magnitude. Nothing but that
sum tells a reply from noise, and it misses one corruption of two bytes in some 256.

Addresses and units are from the control tables of the Dynamixel X series and of Feetech's STS3215.
The port is a raw file descriptor, with reads that end at a deadline; exchanges are repeated where
noise destroyed a reply. In a tick that has to stay short: a servo that does not answer in it may
answer in the next one, and is silent after `PATIENCE` of them.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import termios
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

from embodied.real_robot.kernel.driver import DriverError

BROADCAST = 0xFE
HIGHEST_ID = 0xFC
PING = 0x01
READ = 0x02
WRITE = 0x03
STATUS = 0x55  # of a Dynamixel
SYNC_READ = 0x82
SYNC_WRITE = 0x83
LONGEST = 1024  # bytes of one frame: anything that claims more is noise
MOST = 253  # bytes of data that one frame of Feetech's can carry


class Packet(NamedTuple):
    """A frame whose checksum was right: who, the byte that says what, and what came with it."""

    id: int
    code: int
    data: bytes


class Reply(NamedTuple):
    """The answer of a servo; `error` is its error byte, 0 without an error."""

    id: int
    error: int
    data: bytes


class Codec(ABC):
    """Frames of one protocol."""

    header: ClassVar[bytes]
    width: ClassVar[int]  # bytes of an address, a size and the length
    shortest: ClassVar[int]  # bytes of a frame

    @abstractmethod
    def frame(self, id: int, code: int, data: bytes = b"") -> bytes:
        """The bytes of one packet. ValueError for one that is too long."""

    @abstractmethod
    def opened(self, frame: bytes) -> Packet | None:
        """The packet of a whole frame; None where its checksum is wrong."""

    @abstractmethod
    def reply(self, packet: Packet) -> Reply | None:
        """The reply of a servo; None for what is none."""

    @abstractmethod
    def answer(self, id: int, error: int, data: bytes = b"") -> bytes:
        """The frame of a servo's reply."""

    def take(self, buffer: bytearray) -> Packet | None:
        """The next packet at the front of `buffer`, taken out of it together with the noise before
        it; None while there is no whole one. A frame with a wrong checksum is noise."""
        start = len(self.header)
        body = start + 1 + self.width
        while True:
            at = buffer.find(self.header)
            if at < 0:
                del buffer[: max(0, len(buffer) - start + 1)]
                return None
            del buffer[:at]
            if len(buffer) < body:
                return None
            size = body + int.from_bytes(buffer[start + 1 : body], "little")
            known = buffer[start] <= HIGHEST_ID or buffer[start] == BROADCAST
            if known and self.shortest <= size <= LONGEST:
                if len(buffer) < size:
                    return None
                if (packet := self.opened(bytes(buffer[:size]))) is not None:
                    del buffer[:size]
                    return packet
            del buffer[:1]

    def begins(self, data: bytes | bytearray) -> bool:
        """Whether `data` begins as a frame does; also where there are no data."""
        return self.header.startswith(bytes(data[: len(self.header)]))

    def read(self, id: int, address: int, size: int) -> bytes:
        return self.frame(id, READ, self._number(address) + self._number(size))

    def sync_read(self, address: int, size: int, ids: Sequence[int]) -> bytes:
        """A frame to which every servo of `ids` replies in turn."""
        block = self._number(address) + self._number(size)
        return self.frame(BROADCAST, SYNC_READ, block + bytes(ids))

    def sync_write(self, address: int, data: Mapping[int, bytes]) -> bytes:
        """A frame with as many bytes for every id, without replies."""
        block = self._number(address) + self._number(len(next(iter(data.values()))))
        entries = b"".join(bytes((id,)) + value for id, value in data.items())
        return self.frame(BROADCAST, SYNC_WRITE, block + entries)

    def _number(self, number: int) -> bytes:
        return number.to_bytes(self.width, "little")


class Dynamixel(Codec):
    """Protocol 2.0."""

    header = b"\xff\xff\xfd\x00"
    width = 2
    shortest = 10

    def frame(self, id: int, code: int, data: bytes = b"") -> bytes:
        body = (bytes((code,)) + data).replace(b"\xff\xff\xfd", b"\xff\xff\xfd\xfd")
        if len(body) + 9 > LONGEST:
            raise ValueError(f"a frame of {len(body) + 9} bytes is longer than {LONGEST}")
        out = self.header + bytes((id,)) + self._number(len(body) + 2) + body
        return out + self._number(crc16(out))

    def opened(self, frame: bytes) -> Packet | None:
        if self._number(crc16(frame[:-2])) != frame[-2:]:
            return None
        body = frame[7:-2].replace(b"\xff\xff\xfd\xfd", b"\xff\xff\xfd")
        return Packet(frame[4], body[0], body[1:])

    def reply(self, packet: Packet) -> Reply | None:
        if packet.code != STATUS or not packet.data:  # an instruction: our own, echoed
            return None
        return Reply(packet.id, packet.data[0], packet.data[1:])

    def answer(self, id: int, error: int, data: bytes = b"") -> bytes:
        return self.frame(id, STATUS, bytes((error,)) + data)


class Feetech(Codec):
    """STS and SMS servos. An echo of an instruction looks like a reply: the port has to remove
    it."""

    header = b"\xff\xff"
    width = 1
    shortest = 6

    def frame(self, id: int, code: int, data: bytes = b"") -> bytes:
        if len(data) > MOST:
            raise ValueError(f"{len(data)} bytes of data are more than a frame's {MOST}")
        body = bytes((id, len(data) + 2, code)) + data
        return self.header + body + bytes((~sum(body) & 0xFF,))

    def opened(self, frame: bytes) -> Packet | None:
        if ~sum(frame[2:-1]) & 0xFF != frame[-1]:
            return None
        return Packet(frame[2], frame[4], frame[5:-1])

    def reply(self, packet: Packet) -> Reply | None:
        return None if packet.id == BROADCAST else Reply(*packet)

    def answer(self, id: int, error: int, data: bytes = b"") -> bytes:
        return self.frame(id, error, data)


DYNAMIXEL = Dynamixel()
FEETECH = Feetech()


@cache
def _crc_of(byte: int) -> int:
    crc = byte << 8
    for _ in range(8):
        crc = (crc << 1) ^ (0x8005 if crc & 0x8000 else 0)
    return crc & 0xFFFF


def crc16(data: bytes) -> int:
    """The checksum of a Dynamixel's `data`."""
    crc = 0
    for byte in data:
        crc = ((crc << 8) & 0xFFFF) ^ _crc_of((crc >> 8) ^ byte)
    return crc


def signed(raw: int, bit: int) -> int:
    """The number that `raw` means, whose sign is bit number `bit` (Feetech)."""
    magnitude = raw & ((1 << bit) - 1)
    return -magnitude if raw >> bit & 1 else magnitude


def unsigned(value: int, bit: int) -> int:
    """The register's content for `value` (Feetech). ValueError where it does not fit."""
    if abs(value) >= 1 << bit:
        raise ValueError(f"{value} does not fit into {bit} bits and a sign")
    return (1 << bit) - value if value < 0 else value


TICKS = 4096  # a turn
PATIENCE = 3  # ticks in a row without an answer, then a servo is silent


class Motion(NamedTuple):
    """Measured at the servo's own shaft: ticks, rad/s, and current in units of the register."""

    position: int
    velocity: float
    current: int


Registers = dict[int, bytes]  # bytes to write, by register


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
        faults={0: "input voltage", 2: "overheating", 3: "encoder", 4: "electrical shock"}
        | {5: "overload"},
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
        self.errors: dict[int, int] = {}  # the error byte of every servo's last answer
        self.repeated = 0  # exchanges that had to be repeated
        self.silent: set[int] = set()  # asked in vain: not waited for again before it is cleared
        self.unanswered = dict.fromkeys(names, 0)  # requests in a row without an answer
        self._missed = dict.fromkeys(names, 0)  # ticks in a row without an answer
        self.limited: Mapping[int, int] = {}  # bits of `faults` that a servo limits by itself
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
