"""RPC client of a robot's daemon."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from embodied.real_robot.daemon.requests import (
    FOREIGN,
    Reply,
    Request,
    RequestError,
    Verb,
    parse_reply,
)
from embodied.real_robot.daemon.server import SOCKET

MAX_REPLY_BYTES = 1 << 20


class ClientError(RuntimeError):
    """The daemon cannot be reached: one line that says what to check."""


class ForeignDaemonError(ClientError):
    """The daemon that answers was started by another session."""


def call(
    folder: Path,
    verb: Verb | str,
    timeout: float = 5.0,
    policy: str = "",
    seconds: float | None = None,
    session: str = "",
    supported: bool = False,
) -> Reply:
    """Send `verb` to the daemon in `folder` and return its reply, within `timeout` s.

    `policy` is the run or checkpoint to load, `seconds` the time limit of the episode to start.
    `session`: the token of the session that asks (empty: an operator). `supported`: a person holds
    the arm that is to be released. ClientError, RequestError.
    """
    if verb not in list(Verb):
        raise RequestError(f"unknown verb {verb!r} (known: {', '.join(Verb)})")
    request = Request(1, time.monotonic(), Verb(verb), policy, seconds, session, supported)
    reply = _send(folder, request, timeout)
    if reply.reason == FOREIGN:
        raise ForeignDaemonError(f"the daemon in {folder} belongs to another session")
    return reply


def _send(folder: Path, request: Request, timeout: float) -> Reply:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(timeout)
        try:
            connect(line, folder / SOCKET, time.monotonic() + timeout)
            line.sendall(request.line())
            return parse_reply(_line(line, time.monotonic() + timeout))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise ClientError(f"no daemon runs in {folder}; start one first") from error
        except TimeoutError as error:
            raise ClientError(
                f"the daemon in {folder} did not answer within {timeout:.0f} s; if the arm moves, "
                "use the robot's own stop"
            ) from error
        except OSError as error:
            raise ClientError(f"the daemon in {folder} cannot be reached: {error}") from error


def connect(line: socket.socket, path: Path, deadline: float) -> None:
    """Connect as soon as the server's backlog has room. OSError, TimeoutError."""
    while True:
        try:
            line.connect(str(path))
            return
        except BlockingIOError as error:  # the backlog is full
            if time.monotonic() > deadline:
                raise TimeoutError from error
            time.sleep(0.01)


def _line(line: socket.socket, deadline: float) -> bytes:
    came = b""
    while not came.endswith(b"\n"):
        line.settimeout(max(1e-3, deadline - time.monotonic()))
        more = line.recv(1 << 16)
        if not more or len(came) > MAX_REPLY_BYTES:
            raise ClientError("the daemon closed the connection before it replied")
        came += more
    return came
