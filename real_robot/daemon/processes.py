"""The daemon's child processes: started together, and again only when an operator says `reset`.

What waits for the end of a process is a generator that the daemon resumes at each poll: its main
loop never waits, because the control process watches its heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodied.real_robot.cameras.processes import CameraProcesses
from embodied.real_robot.daemon.child import Child
from embodied.real_robot.daemon.server import Asked
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import DISCARD, READY, RECORDED
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import VERSION

LOADING = 120.0  # s that a newcomer has to get ready
POLICY = "embodied.real_robot.policy.decider"


class Processes:
    """The processes of the deployment in `folder`; `deployment` names the policy that acts."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = folder
        self.deployment = deployment
        self.control = Child("control", "embodied.real_robot.control.main", folder)
        self.policy = Child("policy", POLICY, folder)
        self.recorder = Child("recorder", "embodied.real_robot.recorder", folder)
        self.cameras = CameraProcesses(folder, deployment)
        self.remote = Child("remote", "embodied.real_robot.remote", folder, log="remote.out")
        self.newcomer: Child | None = None  # A policy process that loads beside the one that acts

    def start(self) -> None:
        """Start all processes but `remote`, on new mailboxes."""
        self.recorded = Mailbox(self.folder / "recorded", RECORDED, VERSION, create=True)
        Mailbox(self.folder / "discard", DISCARD, VERSION, create=True)
        self.control.start()
        self.cameras.start()
        self.policy.start()
        self._record()

    def died(self) -> list[str]:
        """Notes about the processes that died since the last call, without the control process."""
        self.cameras.poll()
        children = (self.policy, self.recorder, self.remote, *self.cameras)
        return [child.died for child in children if child.has_died()]

    def restart_dead(self) -> None:
        self.cameras.restart_failed()
        if self.recorder.died:
            self._record()
        if self.remote.died:
            self.remote.start()

    def end_all(self) -> Iterator[None]:
        """End all processes but `remote`, and wait; the recorder may have an episode to write."""
        self.recorder.end(10.0)
        others = (self.control, self.policy, *self.cameras)
        for child in others:
            child.end(0.0)
        while not all([child.ended() for child in (*others, self.recorder)]):
            yield

    def stop(self) -> None:
        """Wait for the end of all. The control process brings the arm to rest before it goes."""
        self.control.stop(patience=10.0)
        self.abandon_newcomer()
        self.policy.stop(patience=2.0)
        self.recorder.stop(patience=30.0)  # it has an episode to write, and files to join
        self.cameras.stop()
        self.remote.stop(patience=2.0)

    def status(self) -> dict[str, Any]:
        about, found = self.deployment, dict[str, Any]()
        if about.recording:
            found["recorder"] = self._recorder_status()
        if about.cameras:
            found["cameras"] = self.cameras.status()
        if about.remote is not None:
            found["remote"] = {"pid": self.remote.pid, "died": self.remote.died}
        return found

    def _record(self) -> None:
        """A recorder, where one is wanted, that has told of nothing yet."""
        if self.deployment.recording:
            self.recorded.fields[:] = np.zeros(1, RECORDED)
            self.recorded.send()
            self.recorder.start()

    def _recorder_status(self) -> dict[str, Any]:
        """Episodes that `ended`, and `episodes` of them that are on the disk."""
        self.recorded.receive()
        fields = self.recorded.fields[0]
        return {
            "pid": self.recorder.pid,
            "died": self.recorder.died,
            "ready": bool(fields["alive"]),
            "ended": int(fields["ended"]),
            "episodes": int(fields["episodes"]),
            "discarded": int(fields["discarded"]),
            "steps": int(fields["steps"]),
            "success": None if fields["success"] < 0 else bool(fields["success"]),
            "problem": bytes(fields["problem"]).decode(errors="replace"),
        }

    def start_newcomer(self, policy: str) -> Child:
        """Start a policy process with the checkpoint or run `policy` beside the one that acts."""
        (self.folder / READY).unlink(missing_ok=True)
        log = "policy.next" if self.policy.log.stem == "policy" else "policy"
        self.newcomer = Child("policy", POLICY, self.folder, (policy,), log)
        self.newcomer.start()
        return self.newcomer

    def is_ready(self, newcomer: Child) -> bool:
        """Whether it has loaded, and decided without posting."""
        file = self.folder / READY
        return newcomer.pid != 0 and file.exists() and file.read_text() == str(newcomer.pid)

    def abandon_newcomer(self) -> None:
        """It posts nothing, so its end is not waited for."""
        if self.newcomer is not None:
            self.newcomer.abandon()
        self.newcomer = None


Answer = Callable[[Asked, bool, str], None]
"""Tells who asked whether it was done, and why not."""


@dataclass
class Restarts:
    """Restarts and replaces processes beside the main loop of the daemon: each takes several polls.

    `poll` often. One at a time; who asks meanwhile is refused. A policy loads beside the one that
    acts. When it is ready the old one is stopped, and only then the new one may post.

    `start`: starts all processes. `policy_started`: called with a note (empty: none) when another
    policy process is there.
    """

    processes: Processes
    answer: Answer
    start: Callable[[], None]
    policy_started: Callable[[str], None]
    clock: Callable[[], float]
    _task: Iterator[None] | None = None
    _loading: Iterator[None] | None = None

    @property
    def busy(self) -> bool:
        return self._task is not None

    def poll(self) -> None:
        if self._task is not None:
            if next(self._task, self) is self:
                self._task = None
        elif self._loading is not None and next(self._loading, self) is self:
            self._loading = None

    def restart_all(self, asked: Asked) -> None:
        def restart() -> Iterator[None]:
            yield from self.processes.end_all()
            self.start()
            self.answer(asked, True, "starting the arm's processes again")

        self._begin(restart(), asked)

    def restart_policy(self, asked: Asked, then: Callable[[Asked], None]) -> None:
        """The policy process anew; `then` answers."""

        def restart() -> Iterator[None]:
            policy = self.processes.policy
            policy.end(0.0)
            while not policy.ended():
                yield
            policy.start()
            self.policy_started("")
            then(asked)

        self._begin(restart(), asked)

    def load(self, asked: Asked) -> None:
        """Load the policy that the request names; it takes over when it is ready."""
        if self.processes.newcomer is not None:
            self.answer(asked, False, "another policy is being loaded; wait for it")
        else:
            newcomer = self.processes.start_newcomer(asked.request.policy)
            self._loading = self._load(newcomer, asked)

    def _begin(self, restart: Iterator[None], asked: Asked) -> None:
        if self._task is not None:
            self.answer(asked, False, "processes are being started; wait for them")
        else:
            self._task = restart

    def _load(self, newcomer: Child, asked: Asked) -> Iterator[None]:
        deadline = self.clock() + LOADING
        while not self.processes.is_ready(newcomer):
            problem = newcomer.died if newcomer.has_died() else ""
            if not problem and self.clock() > deadline:
                problem = f"it was not ready within {LOADING:.0f} s"
            if problem:
                self._keep_old(asked, problem)
                return
            yield
        self._task = self._swap(newcomer, asked)

    def _swap(self, newcomer: Child, asked: Asked) -> Iterator[None]:
        """Let the newcomer act; two never post."""
        processes, policy = self.processes, asked.request.policy
        made = replace(processes.deployment, policy=policy)
        try:
            made.write(processes.folder)
        except OSError as error:
            self._keep_old(asked, str(error))
            return
        processes.deployment = made
        processes.policy.end(0.0)
        while not processes.policy.ended():
            yield
        newcomer.words = ()  # should it have to be started again
        newcomer.send(b"g")
        processes.policy = newcomer
        processes.newcomer = None
        self.policy_started(f"the policy is now {policy}")
        self.answer(asked, True, "")

    def _keep_old(self, asked: Asked, problem: str) -> None:
        self.processes.abandon_newcomer()
        self.answer(asked, False, f"{problem}; the one before goes on")
