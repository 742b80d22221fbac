"""RPC client of a robot's daemon."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from embodied.core.children import module_command
from embodied.real_robot.daemon.child import how_ended
from embodied.real_robot.daemon.requests import (
    FOREIGN,
    Reply,
    Request,
    RequestError,
    Verb,
    parse_reply,
)
from embodied.real_robot.daemon.server import SOCKET, make_private
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.channels import EmergencyStop
from embodied.real_robot.kernel.mailbox import MailboxError, memory_folder
from embodied.real_robot.kernel.messages import Mode

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
    stop: int | None = None,
) -> Reply:
    """Send `verb` to the daemon in `folder` and return its reply, within `timeout` s.

    `policy` is the run or checkpoint to load, `seconds` the time limit of the episode to start.
    `session`: the token of the session that asks (empty: an operator). `supported`: a person holds
    the arm that is to be released. `stop`: number of the newest press of the emergency stop that
    the operator who resets has seen (None: the status is asked first). ClientError, RequestError.
    """
    if verb not in list(Verb):
        raise RequestError(f"unknown verb {verb!r} (known: {', '.join(Verb)})")
    if stop is None and verb == Verb.RESET:
        stop = int(call(folder, Verb.STATUS, timeout).status.get("estop", 0))
    now, saw = time.monotonic(), stop or 0
    request = Request(1, now, Verb(verb), policy, seconds, session, supported, saw)
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
            deadline, came = time.monotonic() + timeout, b""
            while not came.endswith(b"\n"):
                line.settimeout(max(1e-3, deadline - time.monotonic()))
                more = line.recv(1 << 16)
                if not more or len(came) > MAX_REPLY_BYTES:
                    raise ClientError("the daemon closed the connection before it replied")
                came += more
            return parse_reply(came)
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


CONFIRM = 0.5  # s in which the control process is seen to latch
LOOK = 0.005  # s
NEWEST = 200  # records among which the one is that latched
UNCONFIRMED = "the control process was not seen to latch: use the robot's own stop"


@dataclass
class Stopped:
    """`latched`: s from the press until the control process had latched (None: it was not seen to).
    `reply`: the daemon's (None: it did not answer, `problem` says why)."""

    latched: float | None
    reply: Reply | None
    problem: str = ""

    @property
    def done(self) -> bool:
        return self.latched is not None or (self.reply is not None and self.reply.ok)

    def line(self) -> str:
        if not self.done:
            said = self.problem if self.reply is None else self.reply.reason
            return f"{said}; {UNCONFIRMED}"
        took = "" if self.latched is None else f", latched after {1e3 * self.latched:.0f} ms"
        if self.reply is None:
            return f"pressed{took}; {self.problem}"
        return f"pressed{took}"


def emergency_stop(folder: Path, patience: float) -> Stopped:
    """Stop the arm of the daemon in `folder`, in shared memory and by asking the daemon as well,
    which need not answer: the control process looks at the flag in every tick.

    Wait for the daemon's answer for `patience` s at most, and no longer than it takes to see that
    the arm has latched. ClientError: no daemon is there."""
    stopped = Stopped(None, None, "the daemon does not answer")

    def ask() -> None:  # in a thread: the daemon may hang
        try:
            stopped.reply = call(folder, Verb.ESTOP, patience)
        except (ClientError, RequestError) as error:
            stopped.problem = str(error)

    pressed = press(folder)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    if pressed is not None:
        stopped.latched = latched_after(folder, pressed, CONFIRM)
    thread.join(CONFIRM if stopped.latched is not None else patience + LOOK)
    if pressed is None and stopped.reply is None:
        raise ClientError(stopped.problem)
    return Stopped(stopped.latched, stopped.reply, stopped.problem)


def press(folder: Path) -> float | None:
    """Press the stop in shared memory; when (s), or None where there is none."""
    try:
        flag = EmergencyStop(folder / "estop", write=True)
    except (MailboxError, OSError, ValueError):
        return None
    now = time.monotonic()
    flag.press()
    flag.close()
    return now


def latched_after(folder: Path, pressed: float, patience: float = 0.0) -> float | None:
    """Time (s) from `pressed` until the control process had latched (0: it had before); None
    where that was not seen within `patience` s from now."""
    try:
        ring = BlackBox.left(folder / "ring")
    except MailboxError:
        return None
    try:
        deadline = time.monotonic() + patience
        while (found := _first_latched(ring, pressed)) is None and time.monotonic() < deadline:
            time.sleep(LOOK)
        return found
    finally:
        ring.close()


def _first_latched(ring: BlackBox, pressed: float) -> float | None:
    records = ring.since(max(0, ring.count - NEWEST))[0]
    records = records[records["now"] >= pressed]
    latched = records["mode"] == Mode.ESTOP
    if not latched.any() or not latched[-1]:
        return None
    return float(records["now"][latched][0]) - pressed


class DaemonEnded(RuntimeError):
    """The daemon's process has ended; the message is what it wrote to its standard error."""


class DaemonProcess:
    """A daemon in `folder` that ends when this process does (`tied`), or at `stop`.

    It has a token that only this object knows: `call` carries it, and a daemon of another session
    refuses it. RpcServerError where the folder is not this user's alone.
    """

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = make_private(folder)
        self.token = secrets.token_hex(16)
        # Not a file in the folder: another daemon may live there.
        self._errors = tempfile.TemporaryFile(dir=memory_folder())  # noqa: SIM115
        self._process = subprocess.Popen(
            module_command("embodied.real_robot.daemon.daemon", str(folder), "tied"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for this process, which stops it in order
        )
        # Through its standard input: `ps` shows arguments to everyone, and the environment goes on
        # to every child of the daemon
        about = {"session": self.token, "deployment": asdict(deployment)}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and `error` says why
            self._process.stdin.write(json.dumps(about).encode() + b"\n")
            self._process.stdin.flush()

    def call(self, verb: Verb | str, timeout: float = 5.0, seconds: float | None = None) -> Reply:
        """Ask this daemon, and no other that may live in the folder. ClientError, RequestError."""
        return call(self.folder, verb, timeout, seconds=seconds, session=self.token)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def cause(self) -> str:
        how, last = how_ended(self.returncode), self.error().splitlines()[-1:]
        return f"the daemon died ({how}){': ' + last[0][:300] if last else ''}"

    def error(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size  # its own position is that of the writer
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace").strip()

    def wait_until(
        self, so: Callable[[], bool], patience: float, look: float, late: Exception
    ) -> None:
        """Call `so` every `look` s until it returns True. DaemonEnded where the daemon has ended;
        `late` where it takes longer than `patience` s."""
        deadline = time.monotonic() + patience
        while True:
            if so():
                return
            if self.returncode is not None:
                raise DaemonEnded(self.error())
            if time.monotonic() > deadline:
                raise late
            time.sleep(look)

    def stop(self, patience: float) -> None:
        """Let it bring the arm to rest and end, or kill it after `patience` s."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
