"""The camera processes of a deployment, one per camera, so that failures stay separate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from embodied.real_robot.cameras.shared_frames import camera_mailbox
from embodied.real_robot.daemon.child import Child
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.messages import CAMERA
from embodied.real_robot.kernel.mailbox import Mailbox


class CameraProcesses:
    """The daemon's. Where a guest decides (no policy) there are none: it looks for itself."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = folder
        names = deployment.cameras if deployment.policy else {}
        self.children = {
            name: Child(
                f"camera-{name.replace('/', '.')}",
                "embodied.real_robot.cameras.main",
                folder,
                (name,),
            )
            for name in names
        }
        self.mailboxes: dict[str, Mailbox] = {}
        self._restarting: set[str] = set()

    def __iter__(self) -> Iterator[Child]:
        return iter(self.children.values())

    def start(self) -> None:
        """All of them, where none is and nothing is left."""
        self._restarting.clear()
        for name, child in self.children.items():
            self.mailboxes[name] = camera_mailbox(self.folder, name, create=True)
            child.start()

    def restart_failed(self) -> None:
        """Those that died, or have said that they will; `poll` goes on with it."""
        for name, child in self.children.items():
            self.mailboxes[name].receive()
            if child.died or self.mailboxes[name].fields["fault"][0]:
                child.end(0.0)
                self._restarting.add(name)

    def poll(self) -> None:
        """Start again whom `restart_failed` ended, once it is gone: a device may hold it."""
        for name in [each for each in self._restarting if self.children[each].ended()]:
            self._restarting.remove(name)
            self.mailboxes[name].fields[:] = np.zeros(1, CAMERA)
            self.mailboxes[name].send()
            self.children[name].start()

    def stop(self) -> None:
        """They have nothing to put in order."""
        for child in self.children.values():
            child.stop(0.0)

    def clear(self) -> None:
        """What they, or those of a daemon that was killed, left in the folder."""
        for pattern in ("camera.*", "frames.*", ".frames.*"):
            for file in self.folder.glob(pattern):
                file.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """By their names."""
        return {name: {"pid": c.pid, "died": c.died} for name, c in self.children.items()}
