"""A camera's process: `python -m real_robot.cameras.main FOLDER NAME`, started by the daemon.

It alone has the device open and shows its pictures to all others
(real_robot.cameras.shared_frames). It has no hold
on anything: where the camera is gone or frozen it says so and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError
from real_robot.cameras.camera import CameraError
from real_robot.cameras.rendered import posed
from real_robot.cameras.shared_frames import Shown
from real_robot.cameras.sources import FIRST, camera
from real_robot.control.main import when_left_alone
from real_robot.deployment import Deployment
from real_robot.ipc.mailbox import MailboxError

SILENT = 5.0  # s without a picture, after which a camera is gone (`reset` opens it again)


def main(folder: Path, name: str) -> None:
    """Until the daemon is gone, or the camera; CameraError, ConfigError, MailboxError."""
    when_left_alone(lambda reason: os._exit(0))  # also out of a device that never comes back
    shown = Shown(folder, name)
    try:
        show(folder, name, shown)
    except (CameraError, ConfigError) as error:
        shown.fail(str(error))
        raise


def show(folder: Path, name: str, shown: Shown) -> None:
    """Every picture as it comes; a drawn one is of what the arm's process measured last."""
    deployment, number = Deployment.read(folder), 0
    eye = camera(deployment.cameras[name])
    source: Any = eye.source
    state = deployment.boxes(folder).state
    if (scene := posed(eye, state, deployment.sensed, deployment.given)) is not None:
        source.scene = scene
    with eye:
        while True:
            picture = eye.next(number, SILENT if number else FIRST)
            number = picture.number
            shown.add(picture)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except (CameraError, ConfigError, MailboxError) as error:
        sys.exit(f"camera: {error}")
