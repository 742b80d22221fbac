"""The daemon's child processes: started together, and again only when an operator says `reset`.

What waits for the end of a process is a generator that the daemon resumes at each poll: its main
loop never waits, because the control process watches its heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from embodied.real_robot.cameras.processes import CameraProcesses
from embodied.real_robot.daemon.child import Child
from embodied.real_robot.daemon.status import recorder_status
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.mailbox import Mailbox
from embodied.real_robot.ipc.messages import DISCARD, RECORDED, VERSION
from embodied.real_robot.policy.hot_swap import HotSwap


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
