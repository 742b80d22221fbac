"""A camera's process: `python -m real_robot.camera_main FOLDER NAME`, started by the daemon.

It alone has the device open and shows its pictures to all others (real_robot.view). It has no hold
on anything: where the camera is gone or frozen it says so and ends.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.build import ConfigError
from real_robot.camera import CameraError, Frame
from real_robot.cameras import FIRST, camera
from real_robot.control_main import when_left_alone
from real_robot.deployment import Deployment
from real_robot.mailbox import Mailbox, MailboxError
from real_robot.view import Shown

LOOK = 0.02  # s


class Posed:
    """A rendered `scene` whose pictures show what the arm's process measured last."""

    def __init__(self, scene: Any, state: Mailbox, deployment: Deployment) -> None:
        self.scene, self.state, self.about = scene, state, deployment

    def picture(self) -> Frame:
        """The first one waits for the first measurement."""
        while not self.state.receive() and not self.state.seen:
            time.sleep(LOOK)
        fields = self.state.fields[0]
        values = dict(zip(self.about.sensed, fields["sensed"].tolist(), strict=True))
        self.scene.show(
            np.array(fields["q"]), float(fields["width"]), {**values, **self.about.given}
        )
        return self.scene.picture()

    def close(self) -> None:
        if (let_go := getattr(self.scene, "close", None)) is not None:
            let_go()


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
    deployment, number = Deployment.read(folder), 0
    eye = camera(deployment.cameras[name])
    source: Any = eye.source
    if getattr(source, "scene", None) is not None:
        source.scene = Posed(source.scene, deployment.boxes(folder).state, deployment)
    with eye:
        while True:
            picture = eye.next(number, FIRST)
            number = picture.number
            shown.add(picture)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except (CameraError, ConfigError, MailboxError) as error:
        sys.exit(f"camera: {error}")
