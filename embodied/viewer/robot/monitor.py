"""RobotMonitor: reads the state of a running deployment; strictly read-only, without locks.

The mailboxes are mapped read-only; the daemon is asked for its `status`, as by `embodied robot
status`. When a deployment ends, the next one in the folder is monitored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.build import ConfigError
from embodied.real_robot.assemble import build_chain
from embodied.real_robot.daemon.client import ClientError, call
from embodied.real_robot.daemon.requests import RequestError, Verb
from embodied.real_robot.daemon.server import FolderError, find, robots_folder
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import CHUNK, DAEMON_GONE, TERMINATED
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError
from embodied.real_robot.kernel.messages import VERSION, Mode, state_record

ANSWER_TIMEOUT = 0.5  # s, for the daemon's answer
RETRY_AFTER = 3.0  # s, after a failed request
SILENT = 1.0  # s without a tick after which the control process counts as stopped


class WatchedMailbox(Mailbox):
    """A mailbox, mapped read-only, whose file may be replaced. MailboxError, OSError."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.inode = path.stat().st_ino  # one that is replaced meanwhile is not `current`
        super().__init__(path, dtype, VERSION, create=False)

    @property
    def current(self) -> bool:
        """Whether the file at `path` is still the mapped one."""
        try:
            return self.path.stat().st_ino == self.inode
        except OSError:
            return False


class RobotMonitor:
    """The deployment in `folder`; call `poll` often and `query_daemon` now and then. Without a
    folder, that of the only daemon in the default folders, as soon as there is one.

    `state` and `chunk` are the newest messages (None before the first), `status` the daemon's last
    answer, `trouble` why it does not answer. `number` counts the deployments; the last values of a
    deployment stay until the next one starts.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock, self._anywhere = folder or robots_folder(), clock, folder is None
        self.deployment: Deployment | None = None
        self.stages: tuple[str, ...] = ()
        self.state: np.void | None = None
        self.chunk: np.void | None = None
        self.status: dict[str, Any] = {}
        self.trouble, self.number = "", 0
        self._boxes: tuple[WatchedMailbox, WatchedMailbox] | None = None
        self._query_at = 0.0

    @property
    def alive(self) -> bool:
        """Whether the mailboxes exist and the control process ticks."""
        there = self._boxes is not None and self._boxes[0].current
        return there and self.state is not None and self.silence < SILENT

    @property
    def silence(self) -> float:
        return float("inf") if self.state is None else self.clock() - float(self.state["now"])

    @property
    def mode(self) -> str:
        return Mode.DISCONNECTED.name if self.state is None else Mode(int(self.state["mode"])).name

    @property
    def fault(self) -> str:
        if self.state is None:
            return ""
        return bytes(self.state["fault"]).decode(errors="replace")

    @property
    def finished(self) -> bool:
        """Whether the deployment ended as every session does, not by a fault."""
        gone = self._boxes is not None and not self._boxes[0].current
        return gone and (not self.fault or self.fault.startswith((DAEMON_GONE, TERMINATED)))

    @property
    def condition(self) -> str:
        """Why nothing new arrives, in a line; empty if all is well."""
        if self._boxes is None:
            return self.trouble or f"no deployment is running in {self.folder}; waiting for one"
        if not self._boxes[0].current:
            return "the deployment has ended; this is its last state; the next one will follow"
        if self.state is None:
            return "starting: no control tick yet"
        if self.silence >= SILENT:
            return f"the control process has not ticked for {self.silence:.0f} s"
        return self.trouble

    def poll(self) -> bool:
        """Read new messages; True if there was a tick."""
        self._follow()
        if self._boxes is None:
            return False
        state, chunk = self._boxes
        if chunk.receive():
            self.chunk = chunk.fields[0].copy()
        if not state.receive():
            return False
        self.state = state.fields[0].copy()
        return True

    def query_daemon(self) -> None:
        """Ask the daemon for its status; a slow daemon is asked again later."""
        if self._boxes is None or not self._boxes[0].current or self.clock() < self._query_at:
            return
        try:
            self.status, self.trouble = call(self.folder, Verb.STATUS, ANSWER_TIMEOUT).status, ""
        except (ClientError, RequestError) as error:
            self.trouble, self._query_at = str(error), self.clock() + RETRY_AFTER

    def close(self) -> None:
        for box in self._boxes or ():
            box.close()
        self._boxes = None

    def _follow(self) -> None:
        if self._boxes is not None and all(box.current for box in self._boxes):
            return
        boxes: list[WatchedMailbox] = []
        try:
            if self._anywhere:
                self.folder = find()
            path = self.folder / "state"
            if not path.exists():
                return
            deployment = Deployment.read(self.folder)
            stages = build_chain(deployment).names
            record = state_record(deployment.joints, len(stages), len(deployment.sensed))
            boxes.append(WatchedMailbox(path, record))
            boxes.append(WatchedMailbox(self.folder / "chunk", CHUNK))
        except (ConfigError, FolderError, MailboxError, OSError) as error:
            self.trouble = str(error)  # perhaps it is just being written
            for box in boxes:
                box.close()
            return
        self.close()
        self._boxes, self.deployment, self.stages = (boxes[0], boxes[1]), deployment, stages
        self.state = self.chunk = None
        self.status, self.trouble, self._query_at = {}, "", 0.0
        self.number += 1
