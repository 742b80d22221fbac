"""Deployed: a deployment at work as it looks from outside; nothing is written, no lock is held.

The mailboxes are mapped for reading only; besides, the daemon is asked for its `status`, as
`embodied robot status` does. Daemons may end, and others begin: the newest is looked at.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.build import ConfigError
from real_robot.daemon.client import ClientError, call
from real_robot.daemon.requests import RequestError, Verb
from real_robot.deployment import Deployment
from real_robot.ipc.mailbox import HEAD, MAGIC, Mailbox, MailboxError
from real_robot.ipc.messages import CHUNK, VERSION, Mode, state_record

ANSWER = 0.5  # s that the daemon has to answer
AGAIN = 3.0  # s until one that did not is asked again
SILENT = 1.0  # s without a tick after which nobody is at work


class Overheard(Mailbox):
    """A mailbox that somebody else's messages are read in, through memory that cannot be written.
    MailboxError where there is none of this version."""

    def __init__(self, path: Path, dtype: np.dtype[Any], version: int = VERSION) -> None:
        self.path, self.size, self.seen = path, HEAD.itemsize + dtype.itemsize, 0
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise MailboxError(f"{path} cannot be read ({error.strerror})") from error
        try:
            about = os.fstat(handle)
            if about.st_size != self.size:
                raise MailboxError(f"{path} is of another version")
            self._map = mmap.mmap(handle, self.size, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        self.inode = about.st_ino
        self._head = np.frombuffer(self._map, HEAD, 1)
        self._body = np.frombuffer(self._map, dtype, 1, HEAD.itemsize)
        self.fields = np.zeros(1, dtype)
        self._counter = self._head["counter"]
        head = self._head[["magic", "version", "size"]][0].item()
        if head != (MAGIC, version, dtype.itemsize):
            self.close()
            raise MailboxError(f"{path} is of another version")

    @property
    def current(self) -> bool:
        """Whether it is still what lies at `path`; while it is mapped no other file is it."""
        try:
            return self.path.stat().st_ino == self.inode
        except OSError:
            return False


class Deployed:
    """The deployment in `folder`; `look` often, `inquire` now and then.

    `state` and `chunk` are the newest messages (None before there was one), `status` what the
    daemon said last, `trouble` why it says nothing. `number` counts the mailboxes that were seen:
    with another one everything is another deployment's. What was known last stays when it ends.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock = folder, clock
        self.deployment: Deployment | None = None
        self.stages: tuple[str, ...] = ()
        self.state: np.void | None = None
        self.chunk: np.void | None = None
        self.status: dict[str, Any] = {}
        self.trouble, self.number = "", 0
        self._boxes: tuple[Overheard, Overheard] | None = None
        self._ask_at = 0.0

    @property
    def alive(self) -> bool:
        """Whether its mailboxes are there and its control process ticks."""
        there = self._boxes is not None and self._boxes[0].current
        return there and self.state is not None and self.silence < SILENT

    @property
    def silence(self) -> float:
        """s since the last tick."""
        return float("inf") if self.state is None else self.clock() - float(self.state["now"])

    @property
    def mode(self) -> str:
        """What the arm is doing, by its own word while there is one."""
        return Mode.DISCONNECTED.name if self.state is None else Mode(int(self.state["mode"])).name

    @property
    def fault(self) -> str:
        if self.state is None:
            return ""
        return bytes(self.state["fault"]).decode(errors="replace")

    @property
    def standing(self) -> str:
        """Why nothing new is seen, in a line; empty while all is well."""
        if self._boxes is None:
            return f"no deployment is at work in {self.folder}; waiting for one"
        if not self._boxes[0].current:
            return "the deployment has ended; this is its last word; waiting for another one"
        if self.state is None:
            return "it is starting: the arm has not ticked yet"
        if self.silence >= SILENT:
            return f"the control process has not ticked for {self.silence:.0f} s"
        return self.trouble

    def look(self) -> bool:
        """Read what is new; True where there was a tick."""
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

    def inquire(self) -> None:
        """Ask the daemon how things are, where there is one; one that is slow is let be."""
        if self._boxes is None or not self._boxes[0].current or self.clock() < self._ask_at:
            return
        try:
            self.status, self.trouble = call(self.folder, Verb.STATUS, ANSWER).status, ""
        except (ClientError, RequestError) as error:
            self.trouble, self._ask_at = str(error), self.clock() + AGAIN

    def close(self) -> None:
        """Let go of the memory."""
        for box in self._boxes or ():
            box.close()
        self._boxes = None

    def _follow(self) -> None:
        """Open the mailboxes that lie there now, if they are others than before."""
        path = self.folder / "state"
        if self._boxes is not None and all(box.current for box in self._boxes):
            return
        try:
            if not path.exists():
                return
            deployment = Deployment.read(self.folder)
            stages = deployment.chain().names
            record = state_record(deployment.joints, len(stages), len(deployment.sensed))
            state = Overheard(path, record)
        except (ConfigError, MailboxError, OSError) as error:
            self.trouble = str(error)  # perhaps it is just being made
            return
        try:
            chunk = Overheard(self.folder / "chunk", CHUNK)
        except MailboxError as error:
            state.close()
            self.trouble = str(error)
            return
        self.close()
        self._boxes, self.deployment, self.stages = (state, chunk), deployment, stages
        self.state = self.chunk = None
        self.status, self.trouble, self._ask_at = {}, "", 0.0
        self.number += 1
