"""The process that lends a robot: `python -m embodied.deploy.external_main HANDLE`.

HANDLE is a stream socket. A message is its length (4 bytes, big-endian) and JSON; images follow an
observation as such messages of raw bytes (uint8, red first), in the order of `images`. Each request
is answered once, with `error` (one line) where it was not done:

    {"do": "begin", ...settings}    what goes in and out; nothing is opened
    {"do": "connect"}               the arm is held
    {"do": "observe"}               numbers, images
    {"do": "act", "action": {...}}  sent
    {"do": "rest"}                  the arm comes to rest

When the other end closes, the arm comes to rest and is held, and this process ends.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
import sys
from typing import Any

from embodied.core.build import ConfigError, parse
from embodied.core.errors import RobotError
from embodied.deploy.external import Config, External
from embodied.real_robot.cameras.sources import Frame
from embodied.real_robot.kernel.driver import DriverError

LENGTH = struct.Struct(">I")
MOST = 1 << 20  # bytes of a request
Reply = tuple[dict[str, Any], list[Frame]]


class Server:
    """Answers the requests of one program."""

    def __init__(self) -> None:
        self.robot: External | None = None

    def answer(self, request: dict[str, Any]) -> Reply:
        """The reply; ConfigError, RobotError, DriverError."""
        verb = request.pop("do", "")
        if verb == "begin":
            self.robot = External(parse(Config, {"words": [], **request}, "robot"))
            return self.robot.describe(), []
        robot = self.robot
        if robot is None:
            raise ConfigError("begin first")
        if verb == "connect":
            robot.connect()
        elif verb == "observe":
            numbers, images = robot.observe()
            shapes = {name: image.shape for name, image in images.items()}
            return {"numbers": numbers, "images": shapes}, list(images.values())
        elif verb == "act":
            return {"sent": robot.act(request["action"])}, []
        elif verb == "rest":
            robot.rest()
        else:
            raise ConfigError(f"{verb!r} is not understood")
        return {}, []

    def close(self) -> None:
        if self.robot is not None:
            self.robot.close()


def receive(wire: socket.socket) -> bytes:
    """One message. EOFError where the other end closed, or sends too much."""
    size = LENGTH.unpack(_exactly(wire, LENGTH.size))[0]
    if size > MOST:
        raise EOFError(f"a request of {size} bytes")
    return _exactly(wire, size)


def send(wire: socket.socket, message: bytes) -> None:
    wire.sendall(LENGTH.pack(len(message)) + message)


def _exactly(wire: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = wire.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def serve(wire: socket.socket) -> None:
    """Until the other end closes."""
    server = Server()
    try:
        while True:
            request = json.loads(receive(wire))
            try:
                reply, images = server.answer(request)
            except (ConfigError, RobotError, DriverError) as error:
                reply, images = {"error": str(error)}, []
            send(wire, json.dumps(reply).encode())
            for image in images:
                send(wire, image.tobytes())
    except (EOFError, OSError):
        pass
    finally:
        server.close()


def main(handle: int) -> None:
    """Ctrl-C is for the other program, which closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=handle) as wire:
        serve(wire)


if __name__ == "__main__":
    main(int(sys.argv[1]))
