"""RPC client of a robot's daemon, and the start of a daemon that ends with its parent."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from real_robot.daemon.requests import Reply, Request, RequestError, Verb, parse_reply
from real_robot.daemon.server import SOCKET
from real_robot.ipc.mailbox import memory_folder

MAX_REPLY_BYTES = 1 << 20


class ClientError(RuntimeError):
    """The daemon cannot be asked: one line that says what to look at."""


def default_folder() -> Path:
    """Where this user's daemon works unless it was told otherwise: in memory, never on a disk."""
    return memory_folder() / f"embodied-robot-{os.geteuid()}"


def call(folder: Path, verb: Verb | str, timeout: float = 5.0, policy: str = "") -> Reply:
    """What the daemon in `folder` says to `verb`, within `timeout` s; `policy` is what to load.
    ClientError, RequestError."""
    if verb not in list(Verb):
        raise RequestError(f"nobody knows the verb {verb!r} (known: {', '.join(Verb)})")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(timeout)
        try:
            connect(line, folder / SOCKET, time.monotonic() + timeout)
            line.sendall(Request(1, time.monotonic(), Verb(verb), policy).line())
            return parse_reply(_line(line, time.monotonic() + timeout))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise ClientError(f"no daemon is at work in {folder}; start one first") from error
        except TimeoutError as error:
            raise ClientError(
                f"the daemon in {folder} did not answer within {timeout:.0f} s; if the arm moves, "
                "use the robot's own stop"
            ) from error
        except OSError as error:
            raise ClientError(f"the daemon in {folder} cannot be asked: {error}") from error


def connect(line: socket.socket, path: Path, deadline: float) -> None:
    """As soon as there is room; OSError, TimeoutError."""
    while True:
        try:
            line.connect(str(path))
            return
        except BlockingIOError as error:  # others stand in line, as in a flood
            if time.monotonic() > deadline:
                raise TimeoutError from error
            time.sleep(0.01)


def _line(line: socket.socket, deadline: float) -> bytes:
    came = b""
    while not came.endswith(b"\n"):
        line.settimeout(max(1e-3, deadline - time.monotonic()))
        more = line.recv(1 << 16)
        if not more or len(came) > MAX_REPLY_BYTES:
            raise ClientError("the daemon closed the line before it answered")
        came += more
    return came
