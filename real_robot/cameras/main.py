"""Camera process: `python -m embodied.real_robot.cameras.main FOLDER NAME`, started by the daemon.

It alone opens the device and publishes the images in shared memory
(`embodied.real_robot.cameras.shared_frames`). It controls nothing. When the camera is gone or
frozen, the process says so and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.cameras.shared_frames import FrameWriter
from embodied.real_robot.cameras.sources import (
    FIRST_IMAGE,
    CameraError,
    make_camera,
    measured_scene,
)
from embodied.real_robot.control.main import DaemonWatch
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.kernel.mailbox import MailboxError

SILENT = 5.0  # s without a picture, after which a camera is gone (`reset` opens it again)


def main(folder: Path, name: str) -> None:
    """Until the daemon is gone, or the camera; CameraError, ConfigError, MailboxError."""
    DaemonWatch(lambda reason: os._exit(0))  # also out of a device that never comes back
    writer = FrameWriter(folder, name)
    try:
        show(folder, name, writer)
    except (CameraError, ConfigError) as error:
        writer.fail(str(error))
        raise


def show(folder: Path, name: str, writer: FrameWriter) -> None:
    """Every picture as it comes; a drawn one is of what the arm's process measured last."""
    deployment, number = Deployment.read(folder).allow_packages(), 0
    device = make_camera(deployment.cameras[name])
    source: Any = device.source
    state = open_channels(deployment, folder).state
    if (scene := measured_scene(device, state, deployment.sensed, deployment.given)) is not None:
        source.scene = scene
    with device:
        while True:
            picture = device.next(number, SILENT if number else FIRST_IMAGE)
            number = picture.number
            writer.add(picture)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except (CameraError, ConfigError, MailboxError) as error:
        sys.exit(f"camera: {error}")
