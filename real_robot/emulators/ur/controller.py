"""Emulated UR controller: RTDE, the port for programs, the dashboard, and simulated joints.

URScript programs are not interpreted. Two are recognised and emulated: ours
(`real_robot/drivers/ur/driver.py`), which follows registers at every tick, and the script of
ur_rtde. No client is waited for; EOFError and OSError end a connection.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Self

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.emulators.process import Pace, Process, answer, settings

PROTECTIVE = "a protective stop"


class Registers:
    """What is written and read by clients and programs, by RTDE's names: its `values`, and when (s,
    monotonic) each was last `heard` from a client."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.heard: dict[str, float] = {}

    def integer(self, which: int) -> int:
        """An input register; 0 before it is written."""
        return int(self.values.get(f"input_int_register_{which}", 0))

    def doubles(self, first: int, count: int) -> list[float]:
        """Input registers, in a row."""
        names = (f"input_double_register_{i}" for i in range(first, first + count))
        return [float(self.values.get(name, 0.0)) for name in names]


class Following:
    """`embodied.real_robot.drivers.ur.driver.program`: follows registers 24 to 29; integer 24
    beats, 25 is 1 for freedrive, in which a person (a test) sets `joints.q`, and 2 for a protective
    stop. It stops with `brake` (rad/s^2)."""

    def __init__(self, code: str, registers: Registers) -> None:
        self._most = int(re.findall(r"still > (\d+)", code)[0])
        self.lookahead, self.brake = (
            float(re.findall(rf"{word}([\d.]+)", code)[0])
            for word in ("lookahead_time=", r"stopj\(")
        )
        self._beat, self._still, self._begun = registers.integer(24), 0, False
        self._frees = "freedrive_mode()" in code and "end_freedrive_mode()" in code
        self._protects = "protective_stop()" in code
        self.free = False

    def tick(self, joints: UrJoints, registers: Registers) -> str:
        """Why it ends; empty while it goes on."""
        beat = registers.integer(24)
        self._begun = self._begun or (beat != self._beat and beat > 0)
        self._still, self._beat = (self._still + 1 if beat == self._beat else 0), beat
        if self._begun and (beat < 0 or self._still > self._most):
            self.free = False
            return "told" if beat < 0 else "the watchdog"
        if self._begun and self._protects and registers.integer(25) == 2:
            return PROTECTIVE
        self.free = self._begun and self._frees and registers.integer(25) == 1
        if self.free:
            joints.dq = list(STILL)
        elif self._begun:
            joints.follow(registers.doubles(24, 6), self.lookahead)
        return ""


SPEED, ACCELERATION = 2.0, 40.0  # rad/s, rad/s^2
THERE = 1e-6  # rad: friction has the rest
STILL = (0.0,) * 6


class UrJoints:
    """Six simulated joints that servoj and stopj move, each a second-order system. They begin at
    rest at `q` [6] (rad); a tick is 1 / `frequency` s.

        dq' = clip((target - q) / lookahead, +-SPEED),   |dq' - dq| <= ACCELERATION dt

    stopj and a protective stop set dq' = 0 at a program's rate.
    """

    def __init__(self, frequency: float, q: Sequence[float]) -> None:
        self.frequency = frequency
        self.q, self.dq = list(q), list(STILL)

    def follow(self, target: Sequence[float], lookahead: float) -> None:
        """servoj to `target` [6] (rad) for a tick."""
        way = [b - a for a, b in zip(self.q, target, strict=True)]
        self.turn([min(max(w / lookahead, -SPEED), SPEED) for w in way], ACCELERATION)
        for i, to in enumerate(target):
            if abs(to - self.q[i]) < THERE and abs(self.dq[i]) < THERE * self.frequency:
                self.q[i], self.dq[i] = to, 0.0

    def turn(self, speeds: Sequence[float], acceleration: float) -> None:
        """On their way to `speeds` [6] (rad/s) at `acceleration` (rad/s^2), for a tick."""
        most = acceleration / self.frequency
        self.dq = [a + min(max(b - a, -most), most) for a, b in zip(self.dq, speeds, strict=True)]
        self.q = [q + dq / self.frequency for q, dq in zip(self.q, self.dq, strict=True)]

    @property
    def resting(self) -> bool:
        return not any(self.dq)


NOTHING, SERVOJ, SERVO_STOP, SET_WATCHDOG, END = 0, 11, 16, 35, 255
FREEDRIVE, END_FREEDRIVE, PROTECTIVE_STOP = 52, 53, 31
READY, DONE = 1, 2


class ControlScript:
    """The script that ur_rtde 1.6.5 uploads, for the commands that our driver uses. Its watchdog is
    the controller's: it ends the program when the command's register was not written for so long,
    whatever was written.

        input integer 0    the command       output integer 0    1: ready for one, 2: done with it
        input doubles 0..  its numbers       (or all of them 24 further up)

    A command that goes on (servoj) is read at every tick and leaves the script ready. Any other is
    done once, and the script is ready again when the command has gone back to 0.
    """

    def __init__(self, code: str, registers: Registers) -> None:
        self._first = int(re.findall(r"# int register offset\n(\d+)", code)[0])
        self.brake = 10.0
        self._target: list[float] = []
        self._lookahead = 0.1
        self._silence = 0.0  # s that the watchdog waits; 0: there is none
        self._doing = NOTHING
        self.free = False
        self._say(READY, registers)

    def tick(self, joints: UrJoints, registers: Registers) -> str:
        command = registers.integer(self._first)
        heard = registers.heard.get(f"input_int_register_{self._first}", 0.0)
        if self._silence and time.monotonic() - heard > self._silence:
            return "the watchdog"
        if command == END:
            return "told"
        if command == PROTECTIVE_STOP:
            return PROTECTIVE
        if command == SERVOJ:
            numbers = registers.doubles(self._first, 11)
            self._target, self._lookahead = numbers[:6], numbers[9]
        if command in (NOTHING, SERVOJ):
            self._doing = NOTHING
            self._say(READY, registers)
        elif not self._do(command, joints, registers):
            return f"command {command}, which is not played"
        if self._target:
            joints.follow(self._target, self._lookahead)
        else:
            joints.turn(STILL, self.brake)
        return ""

    def _do(self, command: int, joints: UrJoints, registers: Registers) -> bool:
        """A command that is done once; whether it is known."""
        number = registers.doubles(self._first, 1)[0]
        if command == SERVO_STOP:
            if self._doing != command:
                self._target, self.brake = [], number
            if joints.resting:
                self._say(DONE, registers)
        elif command == SET_WATCHDOG:
            self._silence = 1 / number
            self._say(DONE, registers)
        elif command in (FREEDRIVE, END_FREEDRIVE):
            self._target, self.free = [], command == FREEDRIVE
            self._say(DONE, registers)
        else:
            return False
        self._doing = command
        return True

    def _say(self, what: int, registers: Registers) -> None:
        registers.values[f"output_int_register_{self._first}"] = what


TYPES = {
    "timestamp": "DOUBLE",
    "actual_q": "VECTOR6D",
    "actual_qd": "VECTOR6D",
    "actual_TCP_force": "VECTOR6D",
    "actual_current": "VECTOR6D",
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


RTDE, DASHBOARD = 30004, 29999  # ports
SCRIPTS = (30002, 30003)
STOPPED, PLAYING = 1, 2
BRAKE = 4.0  # rad/s^2, before there was a program
START = (0.0, -1.5, 1.5, -1.5, -1.5, 0.0)


class FakeUR:
    """`split` sends byte by byte, `mute` sends nothing, `cut()` closes, `garble` sends nonsense,
    `bits` are its safety bits, `busy` (s) is how late it looks at a program that is sent to it. `q`
    is where its joints are, `halted` why its program ended; `force` (N, N m) and `current` (A) are
    what it says that it measures."""

    def __init__(self, frequency: float = 125.0, q: Sequence[float] = START) -> None:
        self.host = "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
        self.frequency, self.pace = frequency, Pace(1 / frequency)
        self.split = self.mute = self.garble = False
        self.protocol, self.bits, self.mode, self.busy = 2, 1, 7, 0.0
        self.joints, self.registers = UrJoints(frequency, q), Registers()
        self.program: Following | ControlScript | None = None
        self.code, self.halted, self.runtime = "", "", STOPPED
        self.force: Sequence[float] = STILL
        self.current: Sequence[float] = STILL
        self.asked: list[str] = []
        """What the dashboard was asked for."""
        self._cut = False
        self._visitors: list[Visitor] = []
        self._began = time.monotonic()
        self._over = threading.Event()
        ports = (RTDE, *SCRIPTS, DASHBOARD)
        self._ports = {port: socket.create_server((self.host, port)) for port in ports}
        for door in self._ports.values():
            door.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def q(self) -> list[float]:
        return self.joints.q

    @property
    def free(self) -> bool:
        """Whether it is in freedrive."""
        return self.program is not None and self.program.free

    def cut(self) -> None:
        self._cut = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        for port in self._ports.values():
            port.close()
        for visitor in self._visitors:
            visitor.wire.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as doors:
            for number, door in self._ports.items():
                doors.register(door, selectors.EVENT_READ, number)
            wait = self.pace.next()
            while not self._over.is_set():
                for key, _ in doors.select(wait):
                    self._visitors.append(self._visit(key.data))
                if (wait := self.pace.due - time.monotonic()) <= 0:
                    self._tick()
                    wait = self.pace.next()

    def _visit(self, number: int) -> Visitor:
        wire, _ = self._ports[number].accept()
        if number == RTDE:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Client(wire, self.protocol, self.registers)
        if number in SCRIPTS:
            return Programmer(wire, self._begin, self.busy)
        return Asker(wire, self._told)

    def _begin(self, code: str) -> None:
        kind = ControlScript if "def rtde_control" in code else Following
        self.code, self.program = code, kind(code, self.registers)
        self.runtime, self.halted = PLAYING, ""

    def _told(self, words: str) -> None:
        self.asked.append(words)
        if words == "unlock protective stop":
            self.bits = 1
        elif words == "stop" and self.runtime == PLAYING:
            self.runtime, self.halted = STOPPED, "the dashboard"

    def _tick(self) -> None:
        for visitor in list(self._visitors):
            try:
                visitor.hear()
            except (OSError, EOFError):
                self._part(visitor)
            else:
                if self._cut and isinstance(visitor, Client):
                    self._part(visitor)
        self._cut = False
        if self.bits & 0x4 and self.runtime == PLAYING:
            self.runtime, self.halted = STOPPED, PROTECTIVE
        if self.program is None or self.runtime != PLAYING:
            self.joints.turn(STILL, BRAKE if self.program is None else self.program.brake)
        elif ended := self.program.tick(self.joints, self.registers):
            self.runtime, self.halted = STOPPED, ended
            self.bits |= 0x4 if ended == PROTECTIVE else 0
        state = {
            "timestamp": time.monotonic() - self._began,
            "robot_mode": self.mode,
            "actual_q": self.joints.q,
            "actual_qd": self.joints.dq,
            "actual_TCP_force": self.force,
            "actual_current": self.current,
            "safety_mode": 1,
            "safety_status_bits": self.bits,
            "runtime_state": self.runtime,
            "robot_status_bits": 3 if self.runtime == PLAYING else 1,
        }
        for client in [each for each in self._visitors if isinstance(each, Client)]:
            client.split, client.garble = self.split, self.garble
            try:
                if not self.mute:
                    client.tell(state)
            except OSError:
                self._part(client)

    def _part(self, visitor: Visitor) -> None:
        visitor.wire.close()
        self._visitors.remove(visitor)


@dataclass(frozen=True)
class Config:
    """Settings of an emulated UR."""

    q: tuple[Annotated[float, Bound(-math.tau, math.tau)], ...]  # joints [6] at first, rad
    frequency: Annotated[float, Bound(10.0, 500.0)] = 125.0  # Hz of its control box

    def __post_init__(self) -> None:
        if len(self.q) != 6:
            raise ConfigError("q: where each of 6 joints stands")


class UrArm(Process):
    """`start` tells the driver its `host`, an address of this machine's own."""

    def __init__(self, config: Config) -> None:
        super().__init__("embodied.real_robot.emulators.ur.controller", config, "UR")


def main() -> None:
    """Say where it can be reached, and play the arm."""
    config = settings(Config)
    with FakeUR(config.frequency, config.q) as arm:
        answer({"host": arm.host}, arm.pace.behind)


if __name__ == "__main__":
    main()
