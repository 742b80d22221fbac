"""Emulated UR controller: RTDE, the port for programs, the dashboard, and simulated joints.

URScript programs are not interpreted. Two are recognised and emulated: ours
(`real_robot/drivers/ur/driver.py`) and the script of ur_rtde. The joints are those of
`real_robot/emulators/ur/programs.py`.
"""

from __future__ import annotations

import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.emulators.physics_link import Pace, answer, settings
from embodied.real_robot.emulators.process import Process
from embodied.real_robot.emulators.ur.clients import Asker, Client, Programmer, Visitor
from embodied.real_robot.emulators.ur.programs import (
    STILL,
    ControlScript,
    Following,
    Program,
    Registers,
    UrJoints,
)

RTDE, DASHBOARD = 30004, 29999  # ports
SCRIPTS = (30002, 30003)
STOPPED, PLAYING = 1, 2
BRAKE = 4.0  # rad/s^2, before there was a program
START = (0.0, -1.5, 1.5, -1.5, -1.5, 0.0)


class FakeUR:
    """`split` sends byte by byte, `mute` sends nothing, `cut()` closes, `garble` sends nonsense,
    `bits` are its safety bits, `busy` (s) is how late it looks at a program that is sent to it. `q`
    is where its joints are, `halted` why its program ended."""

    def __init__(self, frequency: float = 125.0, q: Sequence[float] = START) -> None:
        self.host = "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
        self.frequency, self.pace = frequency, Pace(1 / frequency)
        self.split = self.mute = self.garble = False
        self.protocol, self.bits, self.mode, self.busy = 2, 1, 7, 0.0
        self.joints, self.registers = UrJoints(frequency, q), Registers()
        self.program: Program | None = None
        self.code, self.halted, self.runtime = "", "", STOPPED
        self.asked: list[str] = []
        """What the dashboard was asked for."""
        self._cut = False
        self._visitors: list[Visitor] = []
        self._began = time.monotonic()
        self._over = threading.Event()
        self._ports = {port: self._listen(port) for port in (RTDE, *SCRIPTS, DASHBOARD)}
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
            self._serve(visitor)
        self._cut = False
        self._move()
        state = self._state()
        for client in [each for each in self._visitors if isinstance(each, Client)]:
            client.split, client.garble = self.split, self.garble
            try:
                if not self.mute:
                    client.tell(state)
            except OSError:
                self._part(client)

    def _serve(self, visitor: Visitor) -> None:
        try:
            visitor.hear()
        except (OSError, EOFError):
            self._part(visitor)
        else:
            if self._cut and isinstance(visitor, Client):
                self._part(visitor)

    def _part(self, visitor: Visitor) -> None:
        visitor.wire.close()
        self._visitors.remove(visitor)

    def _move(self) -> None:
        """What the program does in a tick."""
        if self.bits & 0x4 and self.runtime == PLAYING:
            self.runtime, self.halted = STOPPED, "a protective stop"
        if self.program is None or self.runtime != PLAYING:
            self.joints.turn(STILL, BRAKE if self.program is None else self.program.brake)
        elif ended := self.program.tick(self.joints, self.registers):
            self.runtime, self.halted = STOPPED, ended

    def _state(self) -> dict[str, Any]:
        about = {"timestamp": time.monotonic() - self._began, "robot_mode": self.mode}
        about |= {"actual_q": self.joints.q, "actual_qd": self.joints.dq, "safety_mode": 1}
        about |= {"safety_status_bits": self.bits, "runtime_state": self.runtime}
        return about | {"robot_status_bits": 3 if self.runtime == PLAYING else 1}


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
