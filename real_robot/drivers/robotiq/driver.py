"""WithRobotiq: any arm's driver, and a Robotiq 2F gripper as its hand.

The gripper is asked by a thread of its own, since an exchange takes as long as a tick of the
control loop: `write` leaves the newest opening there, `width` is what it measured last. An error of
the gripper, or one that was silent for `silence` s, is a fault of the robot. It has two wires,
Modbus RTU on a serial port, and a UR controller's socket:

    Modbus (slave 9, 115200 baud)   output registers from 0x03E8 (function 16): action, position,
                                    speed, force; input registers from 0x07D0 (function 3): status,
                                    fault, position
    socket (port 63352)             "SET POS 255\\n" is answered by "ack", "GET POS\\n" by "POS 255"

Positions are 0 (open) to 255 (closed). Written from the maker's manual; no real gripper was tried.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from embodied.core.bounds import Bound, Fraction, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.real_robot.drivers.driver import Driver, DriverAround
from embodied.real_robot.drivers.servos.bus import SerialPort
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError, droop_of, stiffen, unloaded

SLAVE = 9
OUTPUTS = 0x03E8
INPUTS = 0x07D0
ACTIVATE, GO = 0x01, 0x08  # bits of the action byte
READ, WRITE = 3, 16
PORT = 63352
READY = 3  # gSTA: activated


@dataclass(frozen=True)
class Status:
    """`state` (3: activated), `fault` (0: none), `position` (0 open, 255 closed)."""

    state: int
    fault: int
    position: int


def crc(data: bytes) -> bytes:
    """Modbus' CRC-16, low byte first."""
    value = 0xFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xA001 if value & 1 else 0)
    return struct.pack("<H", value)


class Modbus:
    """A serial wire to a gripper, for one exchange of up to `timeout` s at a time. DriverError if
    the gripper does not answer; one that is told not to be active forgets its activation."""

    def __init__(self, path: str, baud: int = 115200, timeout: float = 0.1) -> None:
        self.port = SerialPort(path, baud)
        self.timeout = timeout

    def open(self) -> None:
        self.port.open()

    def close(self) -> None:
        self.port.close()

    def command(self, active: bool, position: int, speed: int, force: int) -> None:
        action = ACTIVATE | GO if active else 0
        outputs = bytes([action, 0, 0, position, speed, force])
        request = struct.pack(">BBHHB", SLAVE, WRITE, OUTPUTS, 3, 6) + outputs
        self._exchange(request, 6)

    def status(self) -> Status:
        reply = self._exchange(struct.pack(">BBHH", SLAVE, READ, INPUTS, 3), 9 - 2)
        if reply[2] != 6:
            raise DriverError(f"{self.port.path}: the gripper sent {reply[2]} bytes instead of 6")
        return Status(reply[3] >> 4 & 3, reply[5] & 0x0F, reply[7])

    def _exchange(self, request: bytes, least: int) -> bytes:
        """The reply without its CRC; `least` bytes come before that."""
        self.port.write(request + crc(request))
        size = least + 2 + (2 if request[1] == READ else 0)
        data, deadline = b"", time.monotonic() + self.timeout
        while len(data) < size:
            part = self.port.read(deadline)
            data += part
            if len(data) >= 5 and data[1] & 0x80:
                raise DriverError(f"{self.port.path}: the gripper refuses (Modbus error {data[2]})")
            if not part:
                raise DriverError(
                    f"{self.port.path}: the gripper does not answer: look at its 24 V, the cable "
                    "and the slave number (9)"
                )
        if data[:2] != request[:2] or crc(data[:-2]) != data[-2:]:
            raise DriverError(f"{self.port.path}: the gripper's answer is garbled")
        return data[:-2]


class UrSocket:
    """A wire as `Modbus`: the gripper program of a UR controller (Robotiq's URCap) at `host`."""

    def __init__(self, host: str, port: int = PORT, timeout: float = 0.5) -> None:
        self.where = (host, port)
        self.timeout = timeout
        self.socket: socket.socket | None = None

    def open(self) -> None:
        self.close()
        try:
            self.socket = socket.create_connection(self.where, self.timeout)
        except OSError as error:
            raise DriverError(
                f"{self.where[0]}:{self.where[1]} does not answer ({error}): is Robotiq's URCap "
                "installed and the gripper switched on?"
            ) from error

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def command(self, active: bool, position: int, speed: int, force: int) -> None:
        words = f"SET ACT {int(active)} GTO {int(active)} SPE {speed} FOR {force} POS {position}"
        if (said := self._ask(words)) != "ack":
            raise DriverError(f"{self.where[0]}: the gripper answered {said[:40]!a} to SET")

    def status(self) -> Status:
        numbers: list[int] = []
        for name in ("STA", "FLT", "POS"):
            said = self._ask(f"GET {name}")
            word, _, number = said.partition(" ")
            if word != name or not number.isdigit():
                answered = f"the gripper answered {said[:40]!a} to GET {name}"
                raise DriverError(f"{self.where[0]}: {answered}")
            numbers.append(int(number))
        return Status(*numbers)

    def _ask(self, line: str) -> str:
        if self.socket is None:
            raise DriverError(f"{self.where[0]} is not open: connect first")
        try:
            self.socket.sendall(line.encode() + b"\n")
            data = self.socket.recv(256)
            while data and not data.endswith(b"\n") and data != b"ack":
                data += (more := self.socket.recv(256))
                if not more:
                    break
        except OSError as error:
            raise DriverError(f"{self.where[0]}: the gripper is gone ({error})") from error
        return data.decode(errors="replace").strip()


CLOSED = 255
PERIOD = 0.03  # s between exchanges
ACTIVATING = 10.0  # s: it opens and closes once


@dataclass(frozen=True)
class Config:
    """Settings of an arm with a Robotiq gripper."""

    arm: Node  # node of the arm's driver
    wire: Literal["serial", "ur"]  # serial, at `port`, or a UR's socket, at `host`
    port: str = ""  # /dev/serial/by-id/...
    host: str = ""  # address of the UR's controller
    socket: Annotated[int, Bound(1, 65535)] = PORT  # TCP port of the UR's socket
    stroke: Annotated[float, Bound(above=0.0, below=1.0)] = 0.085  # opening, m; 0.14 of a 2F-140
    speed: Fraction = 0.5  # share of the fastest
    force: Fraction = 0.2  # share of the strongest
    speeds: tuple[Positive, Positive] = (0.02, 0.15)  # m/s at a speed of 0 and 1
    forces: tuple[Positive, Positive] = (20.0, 235.0)  # N at a force of 0 and 1; 2F-140: 10, 125
    silence: Annotated[float, Bound(above=PERIOD, high=60.0)] = 0.5  # s: then the gripper is lost

    def __post_init__(self) -> None:
        if self.wire == "serial" and not self.port:
            raise ConfigError("driver.wire=serial needs driver.port=/dev/serial/by-id/...")
        if self.wire == "ur" and not self.host:
            raise ConfigError("driver.wire=ur needs driver.host=ADDRESS")
        if not (self.speeds[0] < self.speeds[1] and self.forces[0] < self.forces[1]):
            raise ConfigError("driver: speeds and forces should each grow")


class WithRobotiq(DriverAround):
    """The arm's driver in everything but the hand. Connecting activates the gripper: it moves. A
    stop keeps what it holds."""

    def __init__(self, config: Config) -> None:
        super().__init__(build(config.arm, Driver))
        self.config = config
        self.grip = config.forces[0]
        self.falls_when_released = self.driver.falls_when_released  # type: ignore[misc]
        self.wire = (
            Modbus(config.port) if config.wire == "serial" else UrSocket(config.host, config.socket)
        )
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._problem = ""
        self._speed = round(255 * config.speed)
        self._force = round(255 * config.force)
        self._position = 0
        self._wanted = 0
        self._heard = 0.0

    def connect(self) -> None:
        self.driver.connect()
        try:
            self._begin()
        except DriverError:
            self.driver.stop()
            self.driver.close()
            raise

    def _begin(self) -> None:
        """Activate the gripper, where it is not, and ask it from now on."""
        self._end()
        self.wire.open()
        if self.wire.status().state != READY:
            self.wire.command(False, 0, 0, 0)
            deadline = time.monotonic() + ACTIVATING
            while self.wire.status().state != READY:
                self.wire.command(True, 0, self._speed, self._force)
                if time.monotonic() > deadline:
                    raise DriverError(f"the gripper was not activated within {ACTIVATING:g} s")
                time.sleep(PERIOD)
        self._position = self._wanted = self.wire.status().position
        self._problem = ""
        self._heard = time.monotonic()
        self._over.clear()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self.wire.command(True, self._wanted, self._speed, self._force)
                status = self.wire.status()
            except DriverError as error:
                self._problem = str(error)
                return
            if status.fault >= 8:  # lower ones are notes
                self._problem = f"the gripper reports fault {status.fault:#x}"
                return
            self._position = status.position
            self._heard = time.monotonic()

    def _end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2.0)
            self._thread = None
        self.wire.close()

    def read(self) -> ArmState:
        state = self.driver.read()
        if self._problem:
            raise DriverError(self._problem, state)
        if time.monotonic() - self._heard > self.config.silence:
            raise DriverError("the gripper was silent for too long", state)
        return state

    def write(self, q: Floats, width: float) -> None:
        self._grip(width)
        self.driver.write(q, width)

    def hold(self, q: Floats, width: float) -> bool:
        self._grip(width)
        return self.driver.hold(q, width)

    def limit_hand(self, speed: float, force: float) -> None:
        config = self.config
        self._speed = round(255 * min(config.speed, _share(speed, config.speeds)))
        self._force = round(255 * min(config.force, _share(force, config.forces)))

    def _grip(self, width: float) -> None:
        share = min(max(1 - width / self.config.stroke, 0.0), 1.0)
        self._wanted = round(share * CLOSED)

    @property
    def width(self) -> float:
        """Opening (m) of the maker's fingers: a share of the stroke."""
        return (1 - self._position / CLOSED) * self.config.stroke

    def recover(self) -> None:
        self.driver.recover()
        self._begin()

    def close(self) -> None:
        with suppress(DriverError):
            self._end()
        self.driver.close()

    def release(self) -> None:
        self.driver.release()

    def engage(self) -> None:
        self.driver.engage()

    def droop(self, q: Floats) -> Floats:
        return droop_of(self.driver)(q)

    def unloaded(self, stretch: Floats) -> None:
        unloaded(self.driver, stretch)

    def stiffen(self, stiffness: Floats) -> None:
        stiffen(self.driver, stiffness)

    def renew(self) -> None:
        self.driver.renew()

    def reach(self) -> tuple[Floats, Floats] | None:
        return self.driver.reach()


def _share(value: float, ends: tuple[float, float]) -> float:
    """The share of the way from the first of `ends` to the second at which `value` is, 0 to 1."""
    return min(max((value - ends[0]) / (ends[1] - ends[0]), 0.0), 1.0)
