"""Emulated UR controller: RTDE, the port for programs, the dashboard, and simulated joints.

URScript programs are not interpreted. Ours (`real_robot/drivers/ur/driver.py`), which follows
registers at every tick, is recognised and emulated. No client is waited for; An error of one ends
its connection.
"""

from __future__ import annotations

import math
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Self

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.drivers.ur import driver as ur
from embodied.real_robot.drivers.ur.driver import Recipe, RtdeError, pack_packet, take_packet
from embodied.real_robot.emulators.process import Pace, Process, answer, loopback_address, settings

PROTECTIVE = "a protective stop"
STILL = (0.0,) * 6


class Following:
    """`embodied.real_robot.drivers.ur.driver.program` on `registers`: freedrive, in which a person
    (a test) sets `joints.q`, is `free`; it stops with `brake` (rad/s^2)."""

    def __init__(self, code: str, registers: dict[str, Any]) -> None:
        self._most = int(re.findall(r"still > (\d+)", code)[0])
        self._lookahead = float(re.findall(r"lookahead_time=([\d.]+)", code)[0])
        self.brake = float(re.findall(r"stopj\(([\d.]+)", code)[0])
        self._registers = registers
        self._beat = self._integer(24)
        self._still = 0
        self._begun = False
        self._frees = "freedrive_mode()" in code and "end_freedrive_mode()" in code
        self._protects = "protective_stop()" in code
        self.free = False

    def _integer(self, which: int) -> int:
        return int(self._registers.get(f"input_int_register_{which}", 0))

    def tick(self, joints: UrJoints) -> str:
        """Why it ends; empty while it goes on."""
        beat = self._integer(24)
        self._begun = self._begun or (beat != self._beat and beat > 0)
        self._still = self._still + 1 if beat == self._beat else 0
        self._beat = beat
        if self._begun and (beat < 0 or self._still > self._most):
            self.free = False
            return "told" if beat < 0 else "the watchdog"
        if self._begun and self._protects and self._integer(25) == ur.PROTECT:
            return PROTECTIVE
        self.free = self._begun and self._frees and self._integer(25) == ur.FREE
        if self.free:
            joints.dq = list(STILL)
        elif self._begun:
            names = (f"input_double_register_{i}" for i in range(24, 30))
            target = [float(self._registers.get(name, 0.0)) for name in names]
            joints.follow(target, self._lookahead)
        return ""


SPEED, ACCELERATION = 2.0, 40.0  # rad/s, rad/s^2
THERE = 1e-6  # rad: friction has the rest


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
    **{f"input_double_register_{i}": "DOUBLE" for i in range(48)},
    **{f"input_int_register_{i}": "INT32" for i in range(48)},
}
CONTROLLER = ord("v")  # a request for the version of its software
SOFTWARE = (5, 11, 0, 0)
SAID = {  # on its dashboard
    "close safety popup": "closing safety popup",
    "unlock protective stop": "Protective stop releasing",
}


class Visitor:
    """What has come on a connection and was not understood yet: `got`."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire = wire
        self.got = bytearray()
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

    def texts(self, end: bytes) -> Iterator[str]:
        """Whole texts that end with `end`, taken out of `got`."""
        while (at := self.got.find(end)) >= 0:
            text = bytes(self.got[: at + len(end)]).decode()
            del self.got[: at + len(end)]
            yield text


class Programmer(Visitor):
    """Sends programs: one ends with an `end` at the beginning of a line. What the arm is doing is
    told all the while, wanted or not; what comes is looked at after `busy` s."""

    def __init__(self, wire: socket.socket, begin: Callable[[str], None], busy: float) -> None:
        super().__init__(wire)
        self.begin = begin
        self.from_ = time.monotonic() + busy
        self.chatter()

    def chatter(self) -> None:
        with suppress(OSError):
            self.wire.send(bytes(1000))

    def hear(self) -> None:
        if time.monotonic() >= self.from_:
            self.chatter()
            super().hear()

    def understand(self) -> None:
        for code in self.texts(b"\nend\n"):
            self.begin(code)


class Asker(Visitor):
    """Asks the dashboard, a line each."""

    def __init__(self, wire: socket.socket, told: Callable[[str], None]) -> None:
        super().__init__(wire)
        self.told = told
        wire.sendall(b"Connected: Universal Robots Dashboard Server\n")

    def understand(self) -> None:
        for line in self.texts(b"\n"):
            words = line.strip()
            self.told(words)
            self.wire.sendall(f"{SAID.get(words, 'could not understand: ' + words)}\n".encode())


class Client(Visitor):
    """Of RTDE: agrees on recipes, is sent one of them at every tick, and sends the others."""

    def __init__(self, wire: socket.socket, protocol: int, registers: dict[str, Any]) -> None:
        super().__init__(wire)
        self.protocol = protocol
        self.registers = registers
        self.sends = self.split = self.garble = False
        self._outputs: Recipe | None = None
        self._inputs: list[Recipe] = []

    def understand(self) -> None:
        while (packet := take_packet(self.got)) is not None:
            self._answer(packet.type, packet.payload)

    def tell(self, state: dict[str, Any]) -> None:
        """Where it has asked for data: what it wants of `state` and of the registers."""
        if self.sends and self._outputs is not None:
            known = self.registers | state
            self._send(self._outputs.pack([known.get(name, 0) for name in self._outputs.names]))

    def _answer(self, kind: int, payload: bytes) -> None:
        if kind == ur.VERSION:
            self._say(kind, bytes((int.from_bytes(payload, "big") == self.protocol,)))
        elif kind == CONTROLLER:
            self._say(kind, struct.pack(">4I", *SOFTWARE))
        elif kind == ur.OUTPUTS:
            assert math.isfinite(struct.unpack(">d", payload[:8])[0])
            self._outputs = self._agree(kind, 1, payload[8:])
        elif kind == ur.INPUTS:
            self._inputs.append(self._agree(kind, len(self._inputs) + 1, payload))
        elif kind == ur.DATA:
            self.registers.update(self._inputs[payload[0] - 1].unpack(payload))
        else:
            self.sends = kind == ur.START
            self._say(kind, b"\x01")
            if self.sends:
                self._say(ur.TEXT, b"\x05hello\x04fake\x03")

    def _agree(self, kind: int, number: int, payload: bytes) -> Recipe:
        names = payload.decode().rstrip(",").split(",")
        types = [TYPES[name] for name in names]
        self._say(kind, bytes((number,)) + ",".join(types).encode())
        return Recipe(number, names, types)

    def _say(self, kind: int, payload: bytes) -> None:
        self._send(pack_packet(kind, payload))

    def _send(self, packet: bytes) -> None:
        if self.garble:
            packet = b"\x00\x01" + packet
        size = 1 if self.split else len(packet)
        for at in range(0, len(packet), size):
            self.wire.sendall(packet[at : at + size])


STOPPED = 1
BRAKE = 4.0  # rad/s^2, before there was a program
START_AT = (0.0, -1.5, 1.5, -1.5, -1.5, 0.0)


class FakeUR:
    """`split` sends byte by byte, `mute` sends nothing, `cut()` closes, `garble` sends nonsense,
    `bits` are its safety bits, `busy` (s) is how late it looks at a program that is sent to it.
    `halted` is why its program ended; `force` (N, N m) and `current` (A) are what it says that it
    measures, `asked` is what the dashboard was asked for."""

    def __init__(self, frequency: float = 125.0, q: Sequence[float] = START_AT) -> None:
        self.host = loopback_address()
        self.frequency = frequency
        self.pace = Pace(1 / frequency)
        self.split = self.mute = self.garble = False
        self.protocol = 2
        self.bits = 1
        self.mode = 7
        self.busy = 0.0
        self.joints = UrJoints(frequency, q)
        self.registers: dict[str, Any] = {}
        self.program: Following | None = None
        self.code = self.halted = ""
        self.runtime = STOPPED
        self.force: Sequence[float] = STILL
        self.current: Sequence[float] = STILL
        self.asked: list[str] = []
        self._cut = False
        self._visitors: list[Visitor] = []
        self._began = time.monotonic()
        self._over = threading.Event()
        ports = (ur.RTDE, ur.SCRIPT, ur.DASHBOARD)
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
        if number == ur.RTDE:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Client(wire, self.protocol, self.registers)
        if number == ur.SCRIPT:
            return Programmer(wire, self._begin, self.busy)
        return Asker(wire, self._told)

    def _begin(self, code: str) -> None:
        self.code = code
        self.program = Following(code, self.registers)
        self.runtime = ur.PLAYING
        self.halted = ""

    def _told(self, words: str) -> None:
        self.asked.append(words)
        if words == "unlock protective stop":
            self.bits = 1

    def _halt(self, reason: str) -> None:
        self.runtime = STOPPED
        self.halted = reason

    def _tick(self) -> None:
        for visitor in list(self._visitors):
            try:
                visitor.hear()
            except (OSError, EOFError, RtdeError):
                self._part(visitor)
            else:
                if self._cut and isinstance(visitor, Client):
                    self._part(visitor)
        self._cut = False
        if self.bits & 0x4 and self.runtime == ur.PLAYING:
            self._halt(PROTECTIVE)
        if self.program is None or self.runtime != ur.PLAYING:
            self.joints.turn(STILL, BRAKE if self.program is None else self.program.brake)
        elif ended := self.program.tick(self.joints):
            self._halt(ended)
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
            "robot_status_bits": 3 if self.runtime == ur.PLAYING else 1,
        }
        for client in [each for each in self._visitors if isinstance(each, Client)]:
            client.split = self.split
            client.garble = self.garble
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
