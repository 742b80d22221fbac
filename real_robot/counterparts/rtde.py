"""A UR at the level of its protocols: RTDE, a port for programs, the dashboard; and an arm.

A program that is sent to it is not run but played: once there is one, registers 24 to 29 are
followed as servoj would, by the beat in integer register 24. Each joint is a second-order thing:

    dq' = clip((target - q) / lookahead, +-SPEED),   |dq' - dq| <= ACCELERATION dt

and stopj, or a protective stop, is dq' = 0 at the program's rate.
"""

from __future__ import annotations

import math
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from real_robot.counterparts.played import Pace

TYPES = {
    "timestamp": "DOUBLE",
    "actual_q": "VECTOR6D",
    "actual_qd": "VECTOR6D",
    "robot_mode": "INT32",
    "safety_mode": "INT32",
    "safety_status_bits": "UINT32",
    "runtime_state": "UINT32",
    **{f"input_double_register_{i}": "DOUBLE" for i in range(48)},
    **{f"input_int_register_{i}": "INT32" for i in range(48)},
}
FORMS = {"DOUBLE": "d", "VECTOR6D": "6d", "UINT32": "I", "INT32": "i"}
SPEED, ACCELERATION = 2.0, 40.0  # rad/s, rad/s^2
THERE = 1e-6  # rad: friction has the rest
START = (0.0, -1.5, 1.5, -1.5, -1.5, 0.0)


class FakeUR:
    """`split` sends byte by byte, `mute` sends nothing, `cut()` closes, `garble` sends nonsense,
    `bits` are its safety bits. `q` is where its joints are, `halted` why its program ended."""

    def __init__(self, frequency: float = 125.0, q: Sequence[float] = START) -> None:
        self.host = "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
        self.frequency, self.pace = frequency, Pace(1 / frequency)
        self.split = self.mute = self.garble = False
        self.protocol, self.bits, self.mode = 2, 1, 7
        self.q, self.dq = list(q), [0.0] * 6
        self.values: dict[str, Any] = {}
        self.program, self.halted, self.runtime = "", "", 1
        self._lookahead, self._brake = 0.1, 4.0  # of the program that comes
        self.unlocked: list[str] = []
        self._cut = False
        self._client: socket.socket | None = None
        self._got, self._sends = bytearray(), False
        self._outputs: list[str] = []
        self._inputs: list[str] = []
        self._began = time.monotonic()
        self._beat: int = 0
        self._still: int = 0
        self._most: int = 0
        self._begun: bool = False
        self._over = threading.Event()
        self._ports = {port: self._listen(port) for port in (30004, 30002, 29999)}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def cut(self) -> None:
        self._cut = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(10)
        for port in self._ports.values():
            port.close()

    def _listen(self, port: int) -> socket.socket:
        door = socket.create_server((self.host, port))
        door.setblocking(False)
        return door

    def _run(self) -> None:
        with selectors.DefaultSelector() as doors:
            for number, door in self._ports.items():
                doors.register(door, selectors.EVENT_READ, number)
            wait = self.pace.next()
            while not self._over.is_set():
                for key, _ in doors.select(wait):
                    self._visit(key.data)
                if (wait := self.pace.due - time.monotonic()) <= 0:
                    self._tick()
                    wait = self.pace.next()

    def _visit(self, number: int) -> None:
        visitor, _ = self._ports[number].accept()
        if number == 30004:
            self._client, self._got, self._sends = visitor, bytearray(), False
            self._outputs, self._inputs = [], []
            visitor.setblocking(False)
            return
        with visitor:
            visitor.settimeout(10)
            if number == 29999:
                visitor.sendall(b"Connected: Universal Robots Dashboard Server\n")
                words = visitor.makefile().readline().strip()
                self.unlocked.append(words)
                if words == "unlock protective stop":
                    self.bits = 1
                    visitor.sendall(b"Protective stop releasing\n")
                else:
                    visitor.sendall(b"closing safety popup\n")
                return
            code = b""
            while more := visitor.recv(4096):
                code += more
            self.program, self.runtime, self.halted = code.decode(), 2, ""
            self._beat, self._still = int(self.values.get("input_int_register_24", 0)), 0
            self._begun = False
            self._most = int(re.findall(r"still > (\d+)", self.program)[0])
            self._lookahead, self._brake = (
                float(re.findall(rf"{word}([\d.]+)", self.program)[0])
                for word in ("lookahead_time=", r"stopj\(")
            )

    def _tick(self) -> None:
        self._move()
        if self._client is None:
            return
        if self._cut:
            self._client.close()
            self._client, self._cut = None, False
            return
        try:
            if self._hear() and self._sends and not self.mute:
                state = self._state()
                form = ">" + "".join(FORMS[TYPES[name]] for name in self._outputs)
                flat = [
                    each
                    for name in self._outputs
                    for each in (state[name] if TYPES[name] == "VECTOR6D" else [state[name]])
                ]
                self._say(b"U", b"\x01" + struct.pack(form, *flat))
        except OSError:
            self._client = None

    def _move(self) -> None:
        """What the program does in a tick."""
        if self.bits & 0x4 and self.runtime == 2:
            self.runtime, self.halted = 1, "a protective stop"
        if self.runtime != 2:
            self._turn([0.0] * 6, self._brake)
            return
        beat = int(self.values.get("input_int_register_24", 0))
        self._begun = self._begun or (beat != self._beat and beat > 0)
        self._still, self._beat = (self._still + 1 if beat == self._beat else 0), beat
        if self._begun and (beat < 0 or self._still > self._most):
            self.runtime, self.halted = 1, "told" if beat < 0 else "the watchdog"
        elif self._begun:
            self._follow([self.values[f"input_double_register_{i}"] for i in range(24, 30)])

    def _follow(self, target: list[float]) -> None:
        """servoj for a tick."""
        way = [b - a for a, b in zip(self.q, target, strict=True)]
        self._turn([min(max(w / self._lookahead, -SPEED), SPEED) for w in way], ACCELERATION)
        for i, to in enumerate(target):
            if abs(to - self.q[i]) < THERE and abs(self.dq[i]) < THERE * self.frequency:
                self.q[i], self.dq[i] = to, 0.0

    def _turn(self, speeds: list[float], acceleration: float) -> None:
        """Joints on their way to `speeds` (rad/s), for a tick."""
        most = acceleration / self.frequency
        self.dq = [a + min(max(b - a, -most), most) for a, b in zip(self.dq, speeds, strict=True)]
        self.q = [q + dq / self.frequency for q, dq in zip(self.q, self.dq, strict=True)]

    def _state(self) -> dict[str, Any]:
        about = {"timestamp": time.monotonic() - self._began, "robot_mode": self.mode}
        about |= {"actual_q": self.q, "actual_qd": self.dq, "safety_mode": 1}
        return about | {"safety_status_bits": self.bits, "runtime_state": self.runtime}

    def _hear(self) -> bool:
        """What has come; whether the client is still there."""
        assert self._client is not None
        try:
            data = self._client.recv(65536)
        except BlockingIOError:
            return True
        if not data:
            self._client.close()
            self._client = None
            return False
        self._got += data
        while len(self._got) >= 3:
            size = int.from_bytes(self._got[:2], "big")
            if len(self._got) < size:
                break
            kind, payload = self._got[2:3], bytes(self._got[3:size])
            del self._got[:size]
            self._answer(bytes(kind), payload)
        return True

    def _answer(self, kind: bytes, payload: bytes) -> None:
        if kind == b"V":
            self._say(b"V", bytes((int.from_bytes(payload, "big") == self.protocol,)))
            self._say(b"M", b"\x05hello\x04fake\x03")
        elif kind == b"v":
            self._say(b"v", struct.pack(">4I", 5, 11, 0, 0))
        elif kind == b"O":
            assert math.isfinite(struct.unpack(">d", payload[:8])[0])
            self._outputs = payload[8:].decode().rstrip(",").split(",")
            self._say(b"O", b"\x01" + self._types(self._outputs))
        elif kind == b"I":
            self._inputs = payload.decode().rstrip(",").split(",")
            self._say(b"I", b"\x01" + self._types(self._inputs))
        elif kind in (b"S", b"P"):
            self._sends = kind == b"S"
            self._say(kind, b"\x01")
        elif kind == b"U":
            form = ">" + "".join(FORMS[TYPES[name]] for name in self._inputs)
            values = struct.unpack(form, payload[1:])
            self.values |= dict(zip(self._inputs, values, strict=True))

    def _types(self, names: list[str]) -> bytes:
        return ",".join(TYPES.get(name, "NOT_FOUND") for name in names).encode()

    def _say(self, kind: bytes, payload: bytes) -> None:
        assert self._client is not None
        out = (3 + len(payload)).to_bytes(2, "big") + kind + payload
        if self.garble:
            out = b"\x00\x01" + out
        for piece in [out[i : i + 1] for i in range(len(out))] if self.split else [out]:
            self._client.sendall(piece)
