"""The daemon's child processes: started together, and again only when an operator says `reset`.

What waits for the end of a process is a generator that the daemon resumes at each poll: its main
loop never waits, because the control process watches its heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from embodied.real_robot.cameras.processes import CameraProcesses
from embodied.real_robot.daemon.child import Child
from embodied.real_robot.daemon.requests import Request
from embodied.real_robot.daemon.server import Client
from embodied.real_robot.daemon.status import recorder_status
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import DISCARD, READY, RECORDED
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import VERSION

LOADING = 120.0  # s that a newcomer has to get ready


class HotSwap:
    """Swaps to one new policy at a time: `start`, `poll` until it is ready, then `begin` and
    `finish`. The new process loads, runs a few decisions without posting them, and writes a file
    that says it is ready. Then the old one is stopped, and only then the new one may post."""

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


class Processes:
    """The processes of the deployment in `folder`; `deployment` names the policy that acts."""

    def __init__(
        self, folder: Path, deployment: Deployment, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self.deployment = deployment
        self.control = Child("control", "embodied.real_robot.control.main", folder)
        self.policy = Child("policy", "embodied.real_robot.policy.main", folder)
        self.recorder = Child("recorder", "embodied.real_robot.recording.main", folder)
        self.cameras = CameraProcesses(folder, deployment)
        self.remote = Child("remote", "embodied.real_robot.remote.server", folder, log="remote.out")
        self.hot_swap = HotSwap(folder, clock)

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
        """Start cameras, recorder and remote access again where they died."""
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

    def restart_policy(self) -> Iterator[None]:
        """End the policy process, wait until it is gone, and start a new one."""
        self.policy.end(0.0)
        while not self.policy.ended():
            yield
        self.policy.start()

    def swap_policy(self) -> Iterator[None]:
        """Let the newcomer of `hot_swap` act; two never post. OSError, and nothing changed."""
        self.deployment = self.hot_swap.begin(self.policy, self.deployment)
        return self._take_over()

    def _take_over(self) -> Iterator[None]:
        while not self.policy.ended():
            yield
        self.policy = self.hot_swap.finish()

    def stop(self) -> None:
        """Wait for the end of all. The control process brings the arm to rest before it goes."""
        self.control.stop(patience=10.0)
        self.hot_swap.cancel()
        self.policy.stop(patience=2.0)
        self.recorder.stop(patience=30.0)  # it has an episode to write, and files to join
        self.cameras.stop()
        self.remote.stop(patience=2.0)

    def status(self) -> dict[str, Any]:
        """Status of the processes that a deployment may have."""
        about, found = self.deployment, dict[str, Any]()
        if about.recording:
            found["recorder"] = recorder_status(self.recorder, self.recorded)
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


class Answer(Protocol):
    """Tells a client (None: the daemon itself asked) what came of its request."""

    def __call__(
        self, client: Client | None, request: Request, ok: bool, reason: str = ""
    ) -> None: ...


@dataclass
class Restarts:
    """Restarts and replaces processes beside the main loop of the daemon: each takes several polls.

    `poll` often. One at a time; who asks meanwhile is refused.

    `start`: starts all processes. `policy_started`: called with a note (empty: none) when another
    policy process is there.
    """

    processes: Processes
    answer: Answer
    start: Callable[[], None]
    policy_started: Callable[[str], None]
    _task: Iterator[None] | None = None
    _loading: tuple[Client, Request] | None = None

    @property
    def busy(self) -> bool:
        """Whether a restart is under way."""
        return self._task is not None

    def poll(self) -> None:
        """Go on with what is under way."""
        if self._task is None:
            self._poll_hot_swap()
        elif next(self._task, self) is self:
            self._task = None

    def restart_all(self, client: Client, request: Request) -> None:
        """The robot's processes anew, after the control process died."""
        self._begin(self._restart_all, client, request)

    def restart_policy(
        self, client: Client, request: Request, then: Callable[[Client, Request], None]
    ) -> None:
        """The policy process anew; `then` answers."""

        def restart(client: Client, request: Request) -> Iterator[None]:
            yield from self.processes.restart_policy()
            self.policy_started("")
            then(client, request)

        self._begin(restart, client, request)

    def load(self, client: Client, request: Request) -> None:
        """Start the policy that the request names beside the one that acts; it takes over when it
        is ready."""
        if self.processes.hot_swap.child is not None:
            self.answer(client, request, False, "another policy is being loaded; wait for it")
            return
        self.processes.hot_swap.start(request.policy, self.processes.policy)
        self._loading = (client, request)

    def _begin(
        self, restart: Callable[[Client, Request], Iterator[None]], client: Client, request: Request
    ) -> None:
        if self._task is not None:
            self.answer(client, request, False, "processes are being started; wait for them")
        else:
            self._task = restart(client, request)

    def _restart_all(self, client: Client, request: Request) -> Iterator[None]:
        yield from self.processes.end_all()
        self.start()
        self.answer(client, request, True, "starting the arm's processes again")

    def _poll_hot_swap(self) -> None:
        """Swap to the policy that should take over, once it is ready."""
        if self.processes.hot_swap.child is None:
            return
        problem = self.processes.hot_swap.poll()
        if problem == "":
            self._task = self._swap_policy()
        elif problem is not None:
            self._loaded(problem)

    def _swap_policy(self) -> Iterator[None]:
        try:
            yield from self.processes.swap_policy()
        except OSError as error:
            self.processes.hot_swap.cancel()
            self._loaded(f"{error}; the one before goes on")
            return
        self.policy_started(f"the policy is now {self.processes.deployment.policy}")
        self._loaded("")

    def _loaded(self, problem: str) -> None:
        if self._loading is not None:
            self.answer(*self._loading, not problem, problem)
        self._loading = None
