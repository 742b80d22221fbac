"""RPC client of a robot's daemon, and the start of a daemon that ends with its parent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from real_robot.daemon.requests import Reply, Request, RequestError, Verb, parse_reply
from real_robot.daemon.server import SOCKET
from real_robot.ipc.mailbox import memory_folder

MAX_REPLY_BYTES = 1 << 20


class ClientError(RuntimeError):
    """The daemon cannot be reached: one line that says what to check."""


class DaemonEnded(RuntimeError):
    """The daemon's process has ended; the message is what it wrote to its standard error."""


def default_folder() -> Path:
    """The default folder of this user's daemon: in memory, never on a disk."""
    return memory_folder() / f"embodied-robot-{os.geteuid()}"


def call(folder: Path, verb: Verb | str, timeout: float = 5.0, policy: str = "") -> Reply:
    """Send `verb` to the daemon in `folder` and return its reply, within `timeout` s.

    `policy` is the run or checkpoint to load. ClientError, RequestError.
    """
    if verb not in list(Verb):
        raise RequestError(f"unknown verb {verb!r} (known: {', '.join(Verb)})")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(timeout)
        try:
            connect(line, folder / SOCKET, time.monotonic() + timeout)
            line.sendall(Request(1, time.monotonic(), Verb(verb), policy).line())
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


class DaemonProcess:
    """A daemon in `folder` that ends when this process does (`tied`), or at `stop`.

    The folder has to exist and to hold a deployment (`Deployment.write`).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._errors = folder, folder / "daemon.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "real_robot.daemon.daemon", str(folder), "tied"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for this process, which stops it in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def error(self) -> str:
        """What it wrote to its standard error."""
        return self._errors.read_text().strip()

    def wait_until(
        self, so: Callable[[], bool], patience: float, look: float, late: Callable[[], Exception]
    ) -> None:
        """Call `so` every `look` s until it returns True. DaemonEnded where the daemon has ended;
        the error that `late` makes where it takes longer than `patience` s."""
        deadline = time.monotonic() + patience
        while True:
            if so():
                return
            if self.returncode is not None:
                raise DaemonEnded(self.error())
            if time.monotonic() > deadline:
                raise late()
            time.sleep(look)

    def stop(self, patience: float) -> None:
        """Let it bring the arm to rest and end, or kill it after `patience` s."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _line(line: socket.socket, deadline: float) -> bytes:
    came = b""
    while not came.endswith(b"\n"):
        line.settimeout(max(1e-3, deadline - time.monotonic()))
        more = line.recv(1 << 16)
        if not more or len(came) > MAX_REPLY_BYTES:
            raise ClientError("the daemon closed the connection before it replied")
        came += more
    return came
