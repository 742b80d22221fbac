"""Robot session for RL: drives a robot from this process instead of the daemon's policy process.

The session starts a daemon that ends with this process, writes action chunks where the policy
process would, and sends requests as any operator does. The robot stops when this process falls
silent; the control process keeps its rate, limits and stops whatever happens here.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from embodied.core.errors import RobotError
from real_robot.assemble import open_channels
from real_robot.control.arm_state import Floats
from real_robot.daemon.client import ClientError, call
from real_robot.daemon.requests import RequestError, Verb
from real_robot.deployment import Deployment
from real_robot.ipc.mailbox import MailboxError, memory_folder
from real_robot.ipc.messages import Mode

PATIENCE = 120.0  # s for processes to begin and to end, on a machine that does much else
LOOK = 0.02  # s


class RobotSessionError(RobotError):
    """The arm cannot go on: one line that says why and what to do."""


class RobotSession:
    """`deployment.policy` is empty. `folder` (None: one of its own, in memory) is the daemon's.

    `at` is for those of one process that share an arm (one learns, one evaluates): `owner` says who
    had it last, and it is let go when the last of them closes.
    """

    known: ClassVar[dict[str, RobotSession]] = {}

    @classmethod
    def at(cls, deployment: Deployment, folder: Path | None = None) -> RobotSession:
        """The one that this process has for such an arm, or a new one."""
        key = f"{folder} {json.dumps(asdict(deployment), sort_keys=True)}"
        session = cls.known.get(key)
        if session is None:
            session = cls.known[key] = cls(deployment, folder)
            session.key = key
        session.shared += 1
        return session

    def __init__(self, deployment: Deployment, folder: Path | None = None) -> None:
        self.deployment, self.key, self.shared = deployment, "", 0
        self.owner: object = None
        self.lock = threading.Lock()  # one at a time
        self._temporary_folder = (
            None if folder is not None else tempfile.TemporaryDirectory(dir=memory_folder())
        )
        self.folder = (
            Path(self._temporary_folder.name) if self._temporary_folder is not None else folder
        )
        assert self.folder is not None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        deployment.write(self.folder)
        self.errors = self.folder / "daemon.err"
        with self.errors.open("wb") as errors:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "real_robot.daemon.daemon", str(self.folder), "tied"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for us; we end it in order
            )
        atexit.register(self._end)
        try:
            self.wait_until(lambda: self._daemon_mode() == "IDLE", "the arm is held", PATIENCE)
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        channels = open_channels(self.deployment, self.folder_path)
        self.state_mailbox, self.chunk = channels.state, channels.chunk
        self.number = 0
        self.update()

    @property
    def folder_path(self) -> Path:
        assert self.folder is not None
        return self.folder

    @property
    def state(self) -> Any:
        """The newest state message, as `look` found it."""
        return self.state_mailbox.fields[0]

    @property
    def mode(self) -> Mode:
        return Mode(int(self.state["mode"]))

    @property
    def fault(self) -> str:
        return bytes(self.state["fault"]).decode(errors="replace")

    def update(self) -> None:
        """Until there is a newer state than the last."""
        self.wait_until(self.state_mailbox.receive, "the arm's process tells of the arm", 5.0)

    def send_action(self, action: Floats, seen: float) -> None:
        """`action` [A] from now on, for a step; it was decided from what was seen at `seen` (s)."""
        message = self.chunk.fields[0]
        self.number += 1
        message["number"], message["seen"], message["start"] = self.number, seen, time.monotonic()
        message["steps"], message["size"] = 1, len(action)
        message["actions"][0, : len(action)] = action
        self.chunk.send()

    def request(self, verb: Verb) -> bool:
        """Whether that was done; RobotSessionError where the daemon is gone."""
        try:
            return call(self.folder_path, verb, PATIENCE).ok
        except (ClientError, RequestError) as error:
            raise RobotSessionError(f"{error}: {self._daemon_error()}") from error

    def start(self, rest: Floats) -> None:
        """From held to running, with `rest` [A] as the action until there is another one."""

        def running() -> bool:
            self.update()
            if self.mode == Mode.IDLE:
                self.request(Verb.ARM)
            elif self.mode == Mode.ARMED:
                self.send_action(rest, float(self.state["measured"]))
                time.sleep(2 / self.deployment.hertz)
                self.request(Verb.START)
            elif self.mode == Mode.ESTOP:
                raise RobotSessionError(f"the arm stopped for good: {self.fault}")
            return self.mode == Mode.RUNNING

        self.wait_until(running, "the arm may move", PATIENCE)

    def rest(self) -> None:
        """To rest within the limits, and held."""
        self.update()
        if self.mode in (Mode.ARMED, Mode.RUNNING, Mode.HOMING):
            self.request(Verb.STOP)
        self.wait_until(lambda: self._is(Mode.IDLE, Mode.ESTOP), "the arm rests", PATIENCE)

    def home(self) -> None:
        """To where episodes begin, through the safety chain; things are laid out again there."""
        if not self.deployment.home:
            return
        if not self.request(Verb.HOME):
            raise RobotSessionError("the arm may not go home: see `embodied robot status`")
        self.wait_until(lambda: self._is(Mode.IDLE, Mode.ESTOP), "the arm is home", PATIENCE)

    def _is(self, *modes: Mode) -> bool:
        self.update()
        return self.mode in modes

    def wait_until(self, so: Callable[[], bool], what: str, patience: float) -> None:
        """RobotSessionError where it is not so within `patience` s, or the daemon died."""
        deadline = time.monotonic() + patience
        while not so():
            if self.daemon.poll() is not None:
                raise RobotSessionError(f"the robot's daemon is gone: {self._daemon_error()}")
            if time.monotonic() > deadline:
                raise RobotSessionError(f"{what}: not within {patience:.0f} s")
            time.sleep(LOOK if patience > 5 else 1e-3)

    def _daemon_mode(self) -> str:
        with suppress(ClientError, RequestError, MailboxError):
            return str(call(self.folder_path, Verb.STATUS, 5.0).status["mode"])
        return ""

    def _daemon_error(self) -> str:
        return self.errors.read_text().strip()[-300:] or "it said nothing"

    def close(self) -> None:
        """The arm comes to rest and is held; safe to call twice."""
        self.shared -= 1
        if self.shared > 0:
            return
        atexit.unregister(self._end)
        self._end()

    def _end(self) -> None:
        """Also of a process that ends without closing what it opened."""
        self.known.pop(self.key, None)
        assert self.daemon.stdin is not None
        self.daemon.stdin.close()
        try:
            self.daemon.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()
        if self._temporary_folder is not None:
            self._temporary_folder.cleanup()
            self._temporary_folder = None


class DeadmanTimer:
    """Calls `doze` once when nobody has said `awake` for `patience` s, from a thread of its own.

    A process that hangs as a whole does not come to that, and the arm's own process acts."""

    def __init__(self, patience: float, callback: Callable[[], None], lock: threading.Lock) -> None:
        self.patience, self.callback, self.lock = patience, callback, lock
        self.last: float | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def feed(self) -> None:
        self.last = time.monotonic()

    def pause(self) -> None:
        """Nothing to be done any more until somebody is awake again."""
        self.last = None

    def _watch(self) -> None:
        while not self.done.wait(self.patience / 5):
            with self.lock:
                if self.last is not None and time.monotonic() > self.last + self.patience:
                    self.last = None
                    self.callback()

    def close(self) -> None:
        self.done.set()
        self.thread.join()
