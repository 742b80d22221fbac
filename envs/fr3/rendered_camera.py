"""RenderedCamera: renders an FR3 task from measured joints and object positions.

A virtual camera for a real robot (`embodied.real_robot.cameras.sources.Rendered`), with the same
rendering as in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Count, Ranges
from embodied.envs.fr3.base import RenderScene, TaskInstance, addresses, mocaps
from embodied.envs.mujoco.batch_env import Floats
from embodied.envs.mujoco.cameras import Cameras
from embodied.real_robot.cameras.sources import Scene


@dataclass(frozen=True)
class Config:
    """Settings of a rendered camera."""

    task: str  # of `embodied.envs.fr3.tasks`
    camera: str = "front"  # front or wrist
    size: Count = 64  # pixels of the square image's side
    drawing: str = "light"  # as in `embodied.envs.fr3.env`
    ranges: Ranges = field(default_factory=dict[str, Any])  # ranges of task parameters, by name


class RenderedCamera(Scene):
    """`show` may be called from a different thread than `picture`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.given = TaskInstance(config.task, "sparse", config.ranges)
        self.drawn = RenderScene(self.given.task, meshes=config.drawing == "full")
        self.cameras: Cameras | None = None
        self.shown: tuple[Floats, float, Mapping[str, float]] | None = None

    def show(self, q: Floats, width: float, values: Mapping[str, float]) -> None:
        """Set the state to render: joint angles `q` [7] (rad), the hand opening `width` (m) and the
        positions `values` (`cube_x`, ..., `goal_x`, ...)."""
        self.shown = (q, width, values)

    def picture(self) -> NDArray[np.uint8]:
        """The image of the last `show`, uint8 [size, size, 3]."""
        if self.shown is None:
            raise RuntimeError("RenderedCamera: call show() before picture()")
        q, width, values = self.shown
        task = self.given.task
        native = self.given.native(np.full((1, len(self.given.parameters)), 0.5))
        native |= {name: np.array([values[name]]) for name in native if name in values}
        model, data = self.drawn.shaped(native)
        data.qpos[:7] = q
        data.qpos[7:9] = width / 2
        for name, at in addresses(model, task).items():
            data.qpos[at : at + 3] = [values[f"{name}_{axis}"] for axis in "xyz"]
            yaw = np.arctan2(values.get(f"{name}_sin_4yaw", 0), values.get(f"{name}_cos_4yaw", 1))
            data.qpos[at + 3 : at + 7] = [np.cos(yaw / 8), 0, 0, np.sin(yaw / 8)]
        for name, at in mocaps(model, task).items():
            data.mocap_pos[at] = [values[f"{name}_{axis}"] for axis in "xyz"]
        mujoco.mj_forward(model, data)
        if self.cameras is None:  # the renderer belongs to the thread that creates it
            self.cameras = Cameras((), 0)
        config = self.config
        size = config.size
        return self.cameras.picture(model, data, config.camera, size, size, "observation")

    def close(self) -> None:
        """Release the renderer; call it from the thread that called `picture`."""
        if self.cameras is not None:
            self.cameras.close()
            self.cameras = None
