"""Robot session for RL: drives a robot from this process instead of the daemon's policy process.

The session starts a daemon that ends with this process, writes action chunks where the policy
process would, and sends requests as any operator does. The robot stops when this process falls
silent; the control process keeps its rate, limits and stops whatever happens here.
"""

from __future__ import annotations

import atexit
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from embodied.core.build import ConfigError, Node, build
from embodied.core.errors import RobotError
from embodied.embodiments.controller import Controller
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.daemon.client import ClientError, DaemonEnded, DaemonProcess
from embodied.real_robot.daemon.requests import RequestError, Verb
from embodied.real_robot.daemon.server import RpcServerError
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import Role
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.mailbox import MailboxError, memory_folder
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.teleop.hold_to_run import HoldToRun

PATIENCE = 120.0  # s for processes to start and to end, on a busy machine
LOOK = 0.02  # s
OVER = -1e9  # s: begin of an action whose time is over, so that it moves nothing


class RobotSessionError(RobotError):
    """The robot cannot continue: one line that says why and what to do."""


class RobotSession:
    """A daemon without a policy process, and the actions that this process sends instead.

    `deployment.policy` is empty. `folder` is the daemon's (None: a temporary one, in memory).
    `hold`: the device of hold-to-run (None: the space bar), where the deployment wants one. `at`
    lets several environments of one process share a robot (one trains, one evaluates): `owner` is
    the one that used it last, and the daemon ends when the last of them closes.
    """

    known: ClassVar[dict[str, RobotSession]] = {}

    @classmethod
    def at(
        cls, deployment: Deployment, folder: Path | None = None, hold: Node | None = None
    ) -> RobotSession:
        """The session that this process has for that deployment, or a new one."""
        key = f"{folder} {json.dumps(asdict(deployment), sort_keys=True)}"
        session = cls.known.get(key)
        if session is None:
            session = cls.known[key] = cls(deployment, folder, hold)
            session.key = key
        session.shared += 1
        return session

    def __init__(
        self, deployment: Deployment, folder: Path | None = None, hold: Node | None = None
    ) -> None:
        if hold is not None and not deployment.hold_to_run:
            raise ConfigError("hold names a device of hold-to-run; add hold_to_run: true")
        self.hand = HoldToRun(hold) if deployment.hold_to_run else None
        self.deployment = deployment
        self.key = ""
        self.shared = 0
        self.owner: object = None
        self.lock = threading.Lock()  # one user at a time
        self._temporary_folder: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            self._temporary_folder = tempfile.TemporaryDirectory(dir=memory_folder())
            folder = Path(self._temporary_folder.name)
        self.folder = folder
        try:
            self.daemon = DaemonProcess(self.folder, deployment)
        except RpcServerError as error:
            if self.hand is not None:
                self.hand.close()
            raise RobotSessionError(str(error)) from error
        atexit.register(self._end)
        try:
            self.wait_until(self._is_idle, "the arm to be held", PATIENCE)
            channels = open_channels(self.deployment, self.folder, Role.POLICY)
            self.state_mailbox = channels.state
            self.chunk = channels.chunk
            self.number = 0
            self.update()
            if self.hand is not None:
                self.hand.start(self.folder)
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> Any:
        return self.state_mailbox.fields[0]

    @property
    def mode(self) -> Mode:
        return Mode(int(self.state["mode"]))

    @property
    def fault(self) -> str:
        return bytes(self.state["fault"]).decode(errors="replace")

    def update(self) -> None:
        self.wait_until(self.state_mailbox.receive, "a new state from the control process", 5.0)

    def send_action(self, action: Floats, seen: float, start: float | None = None) -> None:
        """Send `action` [A] for one step from `start` (s; None: now) on; its observation was made
        at `seen` (s)."""
        message = self.chunk.fields[0]
        self.number += 1
        message["number"] = self.number
        message["seen"] = seen
        message["start"] = time.monotonic() if start is None else start
        message["steps"], message["size"] = 1, len(action)
        message["actions"][0, : len(action)] = action
        self.chunk.send()

    def request(self, verb: Verb) -> bool:
        """Send a request; whether it was done. RobotSessionError where the daemon is gone."""
        try:
            return self.daemon.call(verb, PATIENCE).ok
        except (ClientError, RequestError) as error:
            raise RobotSessionError(f"{error}: {self._daemon_error()}") from error

    def start(self) -> None:
        """From held to running. The arm and its hand stay where they are until the first
        `send_action`: of most action spaces, no action means that."""
        nothing = np.zeros(len(build(self.deployment.controller, Controller).names))

        def running() -> bool:
            self.update()
            if self.mode == Mode.IDLE:
                self.request(Verb.ARM)
            elif self.mode == Mode.ARMED:
                self.send_action(nothing, float(self.state["measured"]), OVER)
                time.sleep(2 / self.deployment.hertz)
                self.request(Verb.START)
            elif self.mode == Mode.ESTOP:
                raise RobotSessionError(f"the arm latched a fault: {self.fault}")
            return self.mode == Mode.RUNNING

        self.wait_until(running, "the arm to start running", PATIENCE)

    def rest(self) -> None:
        """Bring the arm to rest within its limits, and hold it."""
        self.update()
        if self.mode in (Mode.ARMED, Mode.RUNNING, Mode.HOMING):
            self.request(Verb.STOP)
        self._wait_for_rest("the arm to come to rest", PATIENCE)

    @property
    def held(self) -> bool:
        """Whether an operator lets the arm move."""
        return self.hand is None or self.hand.held

    def wait_until_held(self, patience: float) -> None:
        """Hold-to-run: rest until an operator holds the arm, for `patience` s at most."""
        if self.hand is None or self.held:
            return
        self.rest()
        print(f"{self.hand.hint}: the arm moves only then", file=sys.stderr, flush=True)
        self.wait_until(lambda: self.held, "an operator's hand (hold_to_run)", patience)

    def home(self) -> None:
        """Move to the home pose through the safety chain; a simulated task is reset there."""
        if not self.deployment.home:
            return
        if not self.request(Verb.HOME):
            raise RobotSessionError(
                "the request to go home was refused: see `embodied robot status`"
            )
        # A hand may let go on the way for as long as it likes.
        patience = PATIENCE if self.hand is None else math.inf
        self._wait_for_rest("the arm to reach its home pose", patience)

    def _wait_for_rest(self, what: str, patience: float) -> None:
        def rests() -> bool:
            self.update()
            return self.mode in (Mode.IDLE, Mode.ESTOP)

        self.wait_until(rests, what, patience)

    def wait_until(self, so: Callable[[], bool], what: str, patience: float) -> None:
        """Call `so` until it returns True. RobotSessionError after `patience` s, or when the daemon
        has died; `what` names what was waited for."""
        late = RobotSessionError(f"timed out after {patience:.0f} s waiting for {what}")
        try:
            self.daemon.wait_until(so, patience, LOOK if patience > 5 else 1e-3, late)
        except DaemonEnded as error:
            raise RobotSessionError(
                f"the robot's daemon is gone: {self._daemon_error()}"
            ) from error

    def _is_idle(self) -> bool:
        with suppress(ClientError, RequestError, MailboxError):
            return self.daemon.call(Verb.STATUS).status["mode"] == "IDLE"
        return False

    def _daemon_error(self) -> str:
        return self.daemon.error()[-300:] or "no error message"

    def close(self) -> None:
        """Bring the arm to rest and hold it, when the last user closes; safe to call twice."""
        self.shared -= 1
        if self.shared > 0:
            return
        atexit.unregister(self._end)
        self._end()

    def _end(self) -> None:
        """Also called at exit of a process that did not close the session."""
        self.known.pop(self.key, None)
        self.daemon.stop(PATIENCE)
        if self.hand is not None:
            self.hand.close()
        if self._temporary_folder is not None:
            self._temporary_folder.cleanup()
            self._temporary_folder = None


class DeadmanTimer:
    """Calls `callback` once, in a thread, when `feed` was not called for `patience` s. When the
    whole process hangs, the control process stops the arm instead."""

    def __init__(self, patience: float, callback: Callable[[], None], lock: threading.Lock) -> None:
        self.patience = patience
        self.callback = callback
        self.lock = lock
        self.last: float | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def feed(self) -> None:
        self.last = time.monotonic()

    def pause(self) -> None:
        self.last = None

    def _run(self) -> None:
        while not self.done.wait(self.patience / 5):
            with self.lock:
                if self.last is not None and time.monotonic() > self.last + self.patience:
                    self.last = None
                    self.callback()

    def close(self) -> None:
        self.done.set()
        self.thread.join()
