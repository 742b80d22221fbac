"""The camera processes of a deployment, one per camera, so that failures stay separate.

The daemon starts `python -m embodied.real_robot.cameras.processes FOLDER NAME`. That process alone
opens the device and publishes the images in shared memory
(`embodied.real_robot.cameras.shared_frames`). It controls nothing. When the camera is gone or
frozen, the process says so and ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.build import ConfigError
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.cameras.shared_frames import FrameWriter, camera_mailbox
from embodied.real_robot.cameras.sources import (
    FIRST_IMAGE,
    CameraError,
    make_camera,
    measured_scene,
)
from embodied.real_robot.control.main import DaemonWatch
from embodied.real_robot.daemon.child import Child
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import CAMERA
from embodied.real_robot.kernel.mailbox import Mailbox, MailboxError

SILENT = 5.0  # s without a picture, after which a camera is gone (`reset` opens it again)


class CameraProcesses:
    """The daemon's. Where a guest decides (no policy), those that are filmed for it."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = folder
        module = "embodied.real_robot.cameras.processes"
        self.children = {
            name: Child(f"camera-{name.replace('/', '.')}", module, folder, (name,))
            for name in (deployment.cameras if deployment.policy else deployment.filmed)
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


def main(folder: Path, name: str) -> None:
    """Show every picture as it comes (a drawn one is of what the arm's process measured last) until
    the daemon is gone, or the camera; CameraError, ConfigError, MailboxError."""
    DaemonWatch(lambda reason: os._exit(0))  # also out of a device that never comes back
    writer = FrameWriter(folder, name)
    number = 0
    try:
        deployment = Deployment.read(folder).allow_packages()
        device = make_camera(deployment.cameras[name])
        source: Any = device.source
        state = open_channels(deployment, folder).state
        scene = measured_scene(device, state, deployment.sensed, deployment.given)
        if scene is not None:
            source.scene = scene
        with device:
            while True:
                picture = device.next(number, SILENT if number else FIRST_IMAGE)
                number = picture.number
                writer.add(picture)
    except (CameraError, ConfigError) as error:
        writer.fail(str(error))
        raise


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except (CameraError, ConfigError, MailboxError) as error:
        sys.exit(f"camera: {error}")
