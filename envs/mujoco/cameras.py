"""Off-screen rendering of MuJoCo scenes (EGL), initialised on first use."""

from __future__ import annotations

from collections.abc import Iterable

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.point_cloud import Pinhole, pinhole_matrix
from embodied.core.spec import Leaf

Image = NDArray[np.uint8]
Point = tuple[float, float, float]


class NoDisplay(RuntimeError):
    """Off-screen rendering could not start on this machine."""


class Cameras:
    """Images by camera name, `size` x `size` pixels; one renderer per image size is kept."""

    def __init__(self, names: tuple[str, ...], size: int) -> None:
        self.names = tuple(names)
        self.size = size
        self._renderers: dict[tuple[int, int, int, bool], mujoco.Renderer] = {}

    def leaves(self) -> dict[str, Leaf]:
        """The observations these cameras add."""
        shape = (self.size, self.size, 3)
        return {name: Leaf(shape, dtype="uint8", low=0, high=255) for name in self.names}

    def observe(
        self, scenes: Iterable[tuple[mujoco.MjModel, mujoco.MjData]]
    ) -> dict[str, NDArray[np.generic]]:
        """The image of every camera for every scene, uint8 [n, size, size, 3] by name."""
        rows = [
            [self.picture(model, data, name, self.size, self.size) for name in self.names]
            for model, data in scenes
        ]
        return {name: np.stack([row[i] for row in rows]) for i, name in enumerate(self.names)}

    def picture(
        self, model: mujoco.MjModel, data: mujoco.MjData, name: str | None, width: int, height: int
    ) -> Image:
        """One image, uint8 [height, width, 3]; `name` None is the model's first camera."""
        renderer = self._renderer(model, width, height)
        renderer.update_scene(data, camera=_camera(model, name))
        return renderer.render().copy()

    def depth(
        self, model: mujoco.MjModel, data: mujoco.MjData, name: str | None, width: int, height: int
    ) -> NDArray[np.float32]:
        """The distance of everything along the viewing axis, m, float32 [height, width]."""
        renderer = self._renderer(model, width, height, depth=True)
        renderer.update_scene(data, camera=_camera(model, name))
        return renderer.render().astype(np.float32)

    @staticmethod
    def pinhole(
        model: mujoco.MjModel, data: mujoco.MjData, name: str, width: int, height: int
    ) -> Pinhole:
        """Intrinsics and pose (in the world's frame) of a camera, for pictures of that size."""
        camera = model.camera(_camera(model, name)).id
        matrix = pinhole_matrix(model.cam_fovy[camera], width, height)
        pose = np.eye(4)
        # MuJoCo's cameras look along their own -z with y up.
        pose[:3, :3] = data.cam_xmat[camera].reshape(3, 3) * [1, -1, -1]
        pose[:3, 3] = data.cam_xpos[camera]
        return Pinhole(matrix, pose)

    def close(self) -> None:
        """Release the rendering contexts."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _renderer(
        self, model: mujoco.MjModel, width: int, height: int, depth: bool = False
    ) -> mujoco.Renderer:
        key = (id(model), width, height, depth)
        if key not in self._renderers:
            try:
                make = _measuring if depth else _drawing
                self._renderers[key] = make(model, width, height)
            except Exception as error:  # the graphics bindings raise many kinds
                raise NoDisplay(
                    f"off-screen rendering cannot start ({error}); install libegl1 and libgl1, "
                    "set MUJOCO_GL=egl, or run without cameras"
                ) from error
        return self._renderers[key]


def _drawing(model: mujoco.MjModel, width: int, height: int) -> mujoco.Renderer:
    screen = model.vis.global_
    screen.offwidth = max(screen.offwidth, width)
    screen.offheight = max(screen.offheight, height)
    return mujoco.Renderer(model, height, width)


def _measuring(model: mujoco.MjModel, width: int, height: int) -> mujoco.Renderer:
    """Depth has no shadows and no blended edges, and in software every sample is paid for."""
    screen = model.vis.global_
    quality = model.vis.quality
    kept = screen.offwidth, screen.offheight, quality.offsamples, quality.shadowsize
    screen.offwidth = width
    screen.offheight = height
    quality.offsamples = quality.shadowsize = 0
    try:
        renderer = mujoco.Renderer(model, height, width)
    finally:
        screen.offwidth, screen.offheight, quality.offsamples, quality.shadowsize = kept
    renderer.enable_depth_rendering()
    return renderer


def looking(place: Point, target: Point, up: Point = (0.0, 0.0, 1.0)) -> list[float]:
    """Quaternion of a camera (it looks along its own -z, y up) at `place` facing `target`."""
    back = np.subtract(place, target)
    back = back / np.linalg.norm(back)
    right = np.cross(up, back)
    right /= np.linalg.norm(right)
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, np.stack([right, np.cross(back, right), back], 1).ravel())
    return quat.tolist()


def _camera(model: mujoco.MjModel, name: str | None) -> int | str:
    """A camera MuJoCo accepts: the named one, else the first, else the free camera (-1)."""
    if name is None:
        return 0 if model.ncam else -1
    known = [model.camera(i).name for i in range(model.ncam)]
    if name not in known:
        raise ValueError(f"unknown camera {name!r}; the scene has {known}")
    return name
