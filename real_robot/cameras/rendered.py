"""A rendered scene that follows the newest measured state of the robot."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied.real_robot.cameras.camera import Camera, Frame
from embodied.real_robot.ipc.mailbox import Mailbox

LOOK = 0.02  # s


class MeasuredScene:
    """`scene` at the joints of the newest `state` message, with the things that are `sensed` there
    by name, and `given` (which counts before that, and may change)."""

    def __init__(
        self, scene: Any, state: Mailbox, sensed: Sequence[str], given: Mapping[str, float]
    ) -> None:
        self.scene = scene
        self.state = state
        self.sensed = tuple(sensed)
        self.given = given

    def picture(self) -> Frame:
        """The first one waits for the first measurement."""
        while not self.state.receive() and not self.state.seen:
            time.sleep(LOOK)
        fields = self.state.fields[0]
        values = dict(zip(self.sensed, fields["sensed"].tolist(), strict=True))
        values = {**values, **self.given}
        self.scene.show(np.array(fields["q"]), float(fields["width"]), values)
        return self.scene.picture()

    def close(self) -> None:
        """The scene lets go of what it holds."""
        if (close := getattr(self.scene, "close", None)) is not None:
            close()


def measured_scene(
    camera: Camera, state: Mailbox, sensed: Sequence[str], given: Mapping[str, float]
) -> MeasuredScene | None:
    """For a `camera` that draws; None for one that takes pictures."""
    source: Any = camera.source
    scene = getattr(source, "scene", None)
    if scene is None:
        return None
    return MeasuredScene(
        scene.scene if isinstance(scene, MeasuredScene) else scene, state, sensed, given
    )
