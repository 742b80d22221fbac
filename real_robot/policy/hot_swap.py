"""Policy hot swap: a new policy process gets ready beside the old one and takes over without a gap.

The new process loads, runs a few decisions without posting them, and writes a file that says it is
ready. Then the old process is stopped, and only then the new one may post: two never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from embodied.real_robot.daemon.child import Child
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.messages import READY

LOADING = 120.0  # s that a newcomer has to get ready


class HotSwap:
    """Swaps to one new policy at a time: `start`, `poll` until it is ready, then `begin` and
    `finish`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.clock = clock
        self.child: Child | None = None

    def start(self, policy: str, acting: Child) -> None:
        """Start a newcomer with the checkpoint or run `policy`."""
        (self.folder / READY).unlink(missing_ok=True)
        log = "policy.next" if acting.log.stem == "policy" else "policy"
        self.child = Child("policy", "embodied.real_robot.policy.main", self.folder, (policy,), log)
        self.policy, self.deadline = policy, self.clock() + LOADING
        self.child.start()

    def poll(self) -> str | None:
        """None: not yet; a reason: it will not come, the old one goes on; "": it is ready."""
        assert self.child is not None
        problem = self.child.died if self.child.has_died() else ""
        if not problem and self.clock() > self.deadline:
            problem = f"it was not ready within {LOADING:.0f} s"
        if problem:
            self.cancel()
            return f"{problem}; the one before goes on"
        file = self.folder / READY
        ready = self.child.pid != 0 and file.exists() and file.read_text() == str(self.child.pid)
        return "" if ready else None

    def begin(self, acting: Child, deployment: Deployment) -> Deployment:
        """The deployment from now on; `finish` follows when `acting` has ended. OSError: it cannot
        be written down, and nothing has changed."""
        deployment = replace(deployment, policy=self.policy)
        deployment.write(self.folder)
        acting.end(0.0)
        return deployment

    def finish(self) -> Child:
        """Let the newcomer act, and return its process."""
        assert self.child is not None
        newcomer = self.child
        self.child = None
        newcomer.words = ()  # should it have to be started again
        newcomer.send(b"g")
        return newcomer

    def cancel(self) -> None:
        """Abandon the newcomer. It posts nothing, so its end is not waited for."""
        if self.child is not None:
            self.child.abandon()
        self.child = None
