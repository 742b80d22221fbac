"""The two wires of a Robotiq 2F gripper: Modbus RTU on a serial port, and a UR controller's socket.

    Modbus (slave 9, 115200 baud)   output registers from 0x03E8 (function 16): action, position,
                                    speed, force; input registers from 0x07D0 (function 3): status,
                                    fault, position
    socket (port 63352)             "SET POS 255\\n" is answered by "ack", "GET POS\\n" by "POS 255"

Positions are 0 (open) to 255 (closed). Written from the maker's manual; no real gripper was tried.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from typing import Protocol

from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.drivers.servos.serial_port import SerialPort

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


class Wire(Protocol):
    """A wire to a gripper, for one exchange at a time; DriverError where the gripper does not
    answer."""

    def open(self) -> None: ...

    def command(self, active: bool, position: int, speed: int, force: int) -> None:
        """Set the outputs; a gripper that is not `active` forgets its activation."""
        ...

    def status(self) -> Status: ...

    def close(self) -> None: ...


def crc(data: bytes) -> bytes:
    """Modbus' CRC-16, low byte first."""
    value = 0xFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xA001 if value & 1 else 0)
    return struct.pack("<H", value)


class Modbus:
    """`timeout` (s) of an exchange."""

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
    """The gripper program of a UR controller (Robotiq's URCap) at `host`."""

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
        return Status(*(self._get(name) for name in ("STA", "FLT", "POS")))

    def _get(self, name: str) -> int:
        said = self._ask(f"GET {name}")
        word, _, number = said.partition(" ")
        if word != name or not number.isdigit():
            raise DriverError(f"{self.where[0]}: the gripper answered {said[:40]!a} to GET {name}")
        return int(number)

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
