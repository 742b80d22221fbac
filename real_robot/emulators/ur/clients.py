"""Connections to an emulated UR, by port: RTDE clients, uploaded programs, dashboard requests.

None of them is waited for; EOFError and OSError end a connection.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from embodied.real_robot.emulators.ur.programs import Registers

TYPES = {
    "timestamp": "DOUBLE",
    "actual_q": "VECTOR6D",
    "actual_qd": "VECTOR6D",
    "robot_mode": "INT32",
    "safety_mode": "INT32",
    "robot_status_bits": "UINT32",
    "safety_status_bits": "UINT32",
    "runtime_state": "UINT32",
    "external_force_torque": "VECTOR6D",
    **{f"{way}put_double_register_{i}": "DOUBLE" for way in ("in", "out") for i in range(48)},
    **{f"{way}put_int_register_{i}": "INT32" for way in ("in", "out") for i in range(48)},
}
FORMS = {"DOUBLE": "d", "VECTOR6D": "6d", "UINT32": "I", "INT32": "i"}
SIZES = {"VECTOR6D": 6}
VERSION = (5, 11, 0, 0)  # of its software
SAID = {  # on its dashboard
    "PolyscopeVersion": "URSoftware 5.11.0.108249 (Dec 21 2021)",
    "get serial number": "20215500001",
    "is in remote control": "true",
    "stop": "Stopped",
    "close safety popup": "closing safety popup",
    "unlock protective stop": "Protective stop releasing",
}


class Visitor:
    """What has come on a connection and was not understood yet: `got`."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire, self.got = wire, bytearray()
        wire.setblocking(False)

    def hear(self) -> None:
        """Take what has come."""
        with suppress(BlockingIOError):
            if not (data := self.wire.recv(65536)):
                raise EOFError
            self.got += data
            self.understand()

    def understand(self) -> None:
        """Do what was asked for, as far as it is whole."""
        raise NotImplementedError


class Programmer(Visitor):
    """Sends programs: one ends with an `end` at the beginning of a line. What the arm is doing is
    told all the while, wanted or not; what comes is looked at after `busy` s."""

    def __init__(self, wire: socket.socket, begin: Callable[[str], None], busy: float) -> None:
        super().__init__(wire)
        self.begin, self.from_ = begin, time.monotonic() + busy
        self.chatter()

    def chatter(self) -> None:
        with suppress(OSError):
            self.wire.send(bytes(1000))

    def hear(self) -> None:
        if time.monotonic() >= self.from_:
            self.chatter()
            super().hear()

    def understand(self) -> None:
        while (end := self.got.find(b"\nend\n")) >= 0:
            code = bytes(self.got[: end + 5]).decode()
            del self.got[: end + 5]
            self.begin(code)


class Asker(Visitor):
    """Asks the dashboard, a line each."""

    def __init__(self, wire: socket.socket, told: Callable[[str], None]) -> None:
        super().__init__(wire)
        self.told = told
        wire.sendall(b"Connected: Universal Robots Dashboard Server\n")

    def understand(self) -> None:
        while (end := self.got.find(b"\n")) >= 0:
            words = bytes(self.got[:end]).decode().strip()
            del self.got[: end + 1]
            self.told(words)
            self.wire.sendall(f"{SAID.get(words, 'could not understand: ' + words)}\n".encode())


class Client(Visitor):
    """Of RTDE: agrees on recipes, is sent one of them at every tick, and sends the others."""

    def __init__(self, wire: socket.socket, protocol: int, registers: Registers) -> None:
        super().__init__(wire)
        self.protocol, self.registers = protocol, registers
        self.sends = self.split = self.garble = False
        self._outputs: list[str] = []
        self._inputs: list[list[str]] = []

    def understand(self) -> None:
        while len(self.got) >= 3 and len(self.got) >= (size := int.from_bytes(self.got[:2], "big")):
            kind, payload = bytes(self.got[2:3]), bytes(self.got[3:size])
            del self.got[:size]
            self._answer(kind, payload)

    def tell(self, state: dict[str, Any]) -> None:
        """Where it has asked for data: what it wants of `state` and of the registers."""
        if not self.sends:
            return
        flat: list[float] = []
        for name in self._outputs:
            value = state.get(name, self.registers.values.get(name, 0))
            flat += value if TYPES[name] == "VECTOR6D" else [value]
        self._say(b"U", b"\x01" + struct.pack(_form(self._outputs), *flat))

    def _answer(self, kind: bytes, payload: bytes) -> None:
        if kind == b"V":
            self._say(b"V", bytes((int.from_bytes(payload, "big") == self.protocol,)))
        elif kind == b"v":
            self._say(b"v", struct.pack(">4I", *VERSION))
        elif kind == b"O":
            assert math.isfinite(struct.unpack(">d", payload[:8])[0])
            self._outputs = _names(payload[8:])
            self._say(b"O", b"\x01" + _types(self._outputs))
        elif kind == b"I":
            self._inputs.append(_names(payload))
            self._say(b"I", bytes((len(self._inputs),)) + _types(self._inputs[-1]))
        elif kind in (b"S", b"P"):
            self.sends = kind == b"S"
            self._say(kind, b"\x01")
            if self.sends:
                self._say(b"M", b"\x05hello\x04fake\x03")
        elif kind == b"U":
            self._write(self._inputs[payload[0] - 1], payload[1:])

    def _write(self, names: list[str], payload: bytes) -> None:
        numbers, now = list(struct.unpack(_form(names), payload)), time.monotonic()
        for name in names:
            count = SIZES.get(TYPES[name], 1)
            self.registers.values[name] = numbers[0] if count == 1 else numbers[:count]
            self.registers.heard[name] = now
            del numbers[:count]

    def _say(self, kind: bytes, payload: bytes) -> None:
        out = (3 + len(payload)).to_bytes(2, "big") + kind + payload
        if self.garble:
            out = b"\x00\x01" + out
        for piece in [out[i : i + 1] for i in range(len(out))] if self.split else [out]:
            self.wire.sendall(piece)


def _names(payload: bytes) -> list[str]:
    return payload.decode().rstrip(",").split(",")


def _types(names: list[str]) -> bytes:
    return ",".join(TYPES.get(name, "NOT_FOUND") for name in names).encode()


def _form(names: list[str]) -> str:
    return ">" + "".join(FORMS[TYPES[name]] for name in names)
