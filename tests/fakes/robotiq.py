"""An emulated Robotiq 2F-85: its register map on a pseudo-terminal, and its words on a socket.

It closes at up to 150 mm/s and stops at an `object` between its fingers. Positions are 0 (open) to
255 (closed).
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import Self

from embodied.real_robot.drivers.robotiq import driver
from embodied.real_robot.drivers.robotiq.driver import ACTIVATE, GO, INPUTS, SLAVE, WRITE, crc
from embodied.real_robot.emulators.process import PtyDevice

FASTEST = 255 / 0.57  # positions a second
ACTIVATION = 0.3  # s; a real one takes some seconds


class Gripper:
    """The gripper itself, behind either wire. `object`: the position where its fingers meet
    something (255: nothing)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.position, self.wanted, self.speed, self.force = 0.0, 0, 255, 255
        self.active, self.moving, self.fault, self.object = False, False, 0, 255
        self.since = self.then = time.monotonic()

    def command(self, active: bool, go: bool, position: int, speed: int, force: int) -> None:
        with self.lock:
            self._move()
            if active and not self.active:
                self.since = time.monotonic()
            self.active, self.moving, self.wanted = active, go, position
            self.speed, self.force = speed, force

    def status(self) -> tuple[int, int, int]:
        """gSTA, gFLT, gPO."""
        with self.lock:
            self._move()
            return self._state, self.fault, round(self.position)

    @property
    def _state(self) -> int:
        return 0 if not self.active else 3 if time.monotonic() > self.since + ACTIVATION else 1

    def _move(self) -> None:
        now = time.monotonic()
        most = (now - self.then) * FASTEST * max(self.speed, 20) / 255
        self.then = now
        if self._state == 3 and self.moving:
            goal = min(self.wanted, self.object)
            self.position += min(max(goal - self.position, -most), most)


class SerialGripper(PtyDevice):
    """Modbus RTU on a pseudo-terminal: its `path`. `deaf`: it no longer answers."""

    pause = 0.02

    def __init__(self) -> None:
        self.gripper, self.deaf = Gripper(), False
        self._frame = b""

    def turn(self, data: bytes) -> None:
        self._frame = self._frame + data if data else b""  # a pause ends a frame
        size = 8 if len(self._frame) < 7 or self._frame[1] != WRITE else 9 + self._frame[6]
        if len(self._frame) >= size:
            frame, self._frame = self._frame[:size], self._frame[size:]
            if not self.deaf and frame[0] == SLAVE and crc(frame[:-2]) == frame[-2:]:
                reply = self.reply(frame[:-2])
                self.send(reply + crc(reply))

    def reply(self, frame: bytes) -> bytes:
        """The answer to a request, both without CRC."""
        kind, at, count = struct.unpack(">BHH", frame[1:6])
        if kind == WRITE and at == driver.OUTPUTS and count == 3:
            action, _, _, position, speed, force = frame[7:13]
            self.gripper.command(bool(action & ACTIVATE), bool(action & GO), position, speed, force)
            return frame[:6]
        if kind in (3, 4) and at == INPUTS and count == 3:
            state, fault, position = self.gripper.status()
            flags = int(self.gripper.active) | int(self.gripper.moving) << 3 | state << 4
            return bytes([SLAVE, kind, 6, flags, 0, fault, self.gripper.wanted, position, 0])
        return bytes([SLAVE, kind | 0x80, 2])  # illegal address


class SocketGripper:
    """The words of a UR controller's gripper program, on `port` of this machine."""

    def __init__(self) -> None:
        self.gripper = Gripper()
        self._values = {"ACT": 0, "GTO": 0, "SPE": 255, "FOR": 255, "POS": 0}

    def __enter__(self) -> Self:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client, client.makefile("r") as lines:
                for line in lines:
                    client.sendall(self.reply(line.split()).encode())

    def reply(self, words: list[str]) -> str:
        if words[:1] == ["SET"]:
            self._values |= {k: int(v) for k, v in zip(words[1::2], words[2::2], strict=True)}
            known = self._values
            self.gripper.command(
                bool(known["ACT"]), bool(known["GTO"]), known["POS"], known["SPE"], known["FOR"]
            )
            return "ack"
        state, fault, position = self.gripper.status()
        told = {"STA": state, "FLT": fault, "POS": position}
        return f"{words[1]} {told[words[1]]}\n" if words[1:] and words[1] in told else "?\n"
