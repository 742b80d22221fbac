"""The process that lends the robot (`python -m embodied.deploy.external_main`), from this side."""

import json
import socket
import struct
import subprocess
import sys
from typing import Any

import numpy as np

LENGTH = struct.Struct(">I")
PATIENCE = 300.0  # s for an answer: connecting starts processes, and homing takes its time
GONE = 150.0  # s for the arm to come to rest and the process to end


class RobotUnavailable(ConnectionError):
    """The robot cannot continue: one line that says why and what to do."""


class Lender:
    """Requests and replies; `begin`'s reply is `about`."""

    def __init__(self, python: str, settings: dict[str, Any], patience: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [
                        python or sys.executable,
                        "-m",
                        "embodied.deploy.external_main",
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is for LeRobot, which disconnects
                )
            except OSError as error:
                ours.close()
                raise RobotUnavailable(f"{python} does not start: {error.strerror}") from error
        self.wire = ours
        self.wire.settimeout(PATIENCE + patience)
        self.about = self.ask("begin", **settings)

    def ask(self, verb: str, **what: Any) -> dict[str, Any]:
        """The reply; RobotUnavailable with the reason where it was not done."""
        message = json.dumps({"do": verb, **what}).encode()
        try:
            self.wire.sendall(LENGTH.pack(len(message)) + message)
            reply: dict[str, Any] = json.loads(self._receive())
        except OSError as error:
            raise RobotUnavailable(f"the robot's process does not answer: {error}") from error
        if "error" in reply:
            raise RobotUnavailable(reply["error"])
        return reply

    def observe(self) -> dict[str, Any]:
        """Numbers, and images uint8 [height, width, 3]."""
        reply = self.ask("observe")
        images = {
            name: np.frombuffer(self._receive(), np.uint8).reshape(shape)
            for name, shape in reply["images"].items()
        }
        return {**reply["numbers"], **images}

    def close(self) -> None:
        """The arm comes to rest and is held; safe to call twice."""
        self.wire.close()
        try:
            self.process.wait(GONE)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _receive(self) -> bytes:
        return self._exactly(LENGTH.unpack(self._exactly(LENGTH.size))[0])

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.wire.recv(size - len(parts))
            if not part:
                raise RobotUnavailable(
                    "the robot's process has ended: does --robot.python name the interpreter that "
                    "has embodied? Its reason is above"
                )
            parts += part
        return bytes(parts)
