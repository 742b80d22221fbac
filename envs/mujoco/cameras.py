"""Off-screen rendering of MuJoCo scenes (EGL), initialised on first use.

Its quality is that of its purpose:

| purpose | shadows, reflections | samples per pixel | meshes |
| film, for people | as the scene says | as the scene says | whole |
| the same, up to `SMALL_FILM` wide | coarse shadows | at most 4 | decimated, finely |
| observation, for policies and rewards | none | at most 4 | decimated |
| depth | none | 1 | whole, as places are measured |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.core.pinhole import Pinhole, pinhole_matrix
from embodied.core.spec import Leaf

Image = NDArray[np.uint8]
Point = tuple[float, float, float]
Purpose = Literal["film", "observation", "depth"]
SAMPLES: dict[Purpose, int] = {"film": 4, "observation": 4, "depth": 0}
"""Most samples per pixel: blended edges; distances must not be blended."""
SHADOWS = 1024
"""Most pixels along a side of the shadow map of a small film."""
SMALL_FILM = 320
"""Films up to this wide (pixels) are drawn more coarsely, in a quarter of the time in software."""
SMALL_MESH = 300
"""Meshes with up to this many triangles are drawn as they are."""
CELLS: dict[Purpose, int] = {"film": 40, "observation": 20}
"""Cells along the diagonal of a decimated mesh: about a pixel of a small picture of a whole arm."""
FACES = ("mesh_face", "mesh_facenormal", "mesh_facetexcoord", "mesh_facenum")


class NoDisplay(RuntimeError):
    """Off-screen rendering could not start on this machine."""


class Cameras:
    """Images by camera name, `size` x `size` pixels; one renderer per size and purpose is kept."""

    def __init__(self, names: tuple[str, ...], size: int) -> None:
        self.names = tuple(names)
        self.size = size
        self._renderers: dict[tuple[int, int, int, Purpose], mujoco.Renderer] = {}

    def leaves(self) -> dict[str, Leaf]:
        """The observations these cameras add."""
        shape = (self.size, self.size, 3)
        return {name: Leaf(shape, dtype="uint8", low=0, high=255) for name in self.names}

    def observe(
        self, scenes: Iterable[tuple[mujoco.MjModel, mujoco.MjData]]
    ) -> dict[str, NDArray[np.generic]]:
        """The image of every camera for every scene, uint8 [n, size, size, 3] by name."""
        rows = [
            [
                self.picture(model, data, name, self.size, self.size, "observation")
                for name in self.names
            ]
            for model, data in scenes
        ]
        return {name: np.stack([row[i] for row in rows]) for i, name in enumerate(self.names)}

    def picture(
        self,
        model: mujoco.MjModel,
        data: mujoco.MjData,
        name: str | None,
        width: int,
        height: int,
        purpose: Purpose = "film",
    ) -> Image:
        """One image, uint8 [height, width, 3]; `name` None is the model's first camera."""
        renderer = self._renderer(model, width, height, purpose)
        renderer.update_scene(data, camera=_camera(model, name))
        return renderer.render().copy()

    def depth(
        self, model: mujoco.MjModel, data: mujoco.MjData, name: str | None, width: int, height: int
    ) -> NDArray[np.float32]:
        """The distance of everything along the viewing axis, m, float32 [height, width]."""
        renderer = self._renderer(model, width, height, "depth")
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
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _renderer(
        self, model: mujoco.MjModel, width: int, height: int, purpose: Purpose
    ) -> mujoco.Renderer:
        key = (id(model), width, height, purpose)
        if key not in self._renderers:
            try:
                make = _full if purpose == "film" and width > SMALL_FILM else _cheap
                self._renderers[key] = make(model, width, height, purpose)
            except Exception as error:  # the graphics bindings raise many kinds
                raise NoDisplay(
                    f"off-screen rendering cannot start ({error}); install libegl1 and libgl1, "
                    "set MUJOCO_GL=egl, or run without cameras"
                ) from error
        return self._renderers[key]


def _full(model: mujoco.MjModel, width: int, height: int, purpose: Purpose) -> mujoco.Renderer:
    screen = model.vis.global_
    screen.offwidth = max(screen.offwidth, width)
    screen.offheight = max(screen.offheight, height)
    return mujoco.Renderer(model, height, width)


def _cheap(model: mujoco.MjModel, width: int, height: int, purpose: Purpose) -> mujoco.Renderer:
    """In software every shadow, sample and triangle is paid for."""
    with _restored(model):
        screen = model.vis.global_
        screen.offwidth = width
        screen.offheight = height
        quality = model.vis.quality
        quality.offsamples = min(quality.offsamples, SAMPLES[purpose])
        quality.shadowsize = min(quality.shadowsize, SHADOWS) if purpose == "film" else 0
        for mesh in range(model.nmesh if purpose in CELLS else 0):
            decimate(model, mesh, CELLS[purpose])
        renderer = mujoco.Renderer(model, height, width)  # copies what was changed
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
    if purpose == "depth":
        renderer.enable_depth_rendering()
    return renderer


@contextmanager
def _restored(model: mujoco.MjModel) -> Iterator[None]:
    """What makes a renderer of `model` cheap may be changed inside, and is as before outside."""
    screen = model.vis.global_
    quality = model.vis.quality
    kept = screen.offwidth, screen.offheight, quality.offsamples, quality.shadowsize
    faces = {name: getattr(model, name).copy() for name in FACES}
    try:
        yield
    finally:
        screen.offwidth, screen.offheight, quality.offsamples, quality.shadowsize = kept
        for name, value in faces.items():
            getattr(model, name)[:] = value


def decimate(model: mujoco.MjModel, mesh: int, cells: int) -> None:
    """Give a dense mesh of `model` fewer triangles, in place: `cells` along its diagonal.

    The vertices of a cell become that in its middle: vertex clustering (Rossignac and Borrel,
    1993). Corners keep their normals, so edges stay sharp.
    """
    begin, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
    if count <= SMALL_MESH:
        return
    first = model.mesh_vertadr[mesh]
    places = model.mesh_vert[first : first + model.mesh_vertnum[mesh]].astype(np.float64)
    low = places.min(0)
    grid = (places - low) / max(float(np.linalg.norm(places.max(0) - low)) / cells, 1e-12)
    cell = np.floor(grid).astype(np.int64)
    central = np.argsort(np.square(grid - cell - 0.5).sum(1), kind="stable")
    number = (cell @ (1, cells + 1, (cells + 1) ** 2))[central]
    _, leader, which = np.unique(number, return_index=True, return_inverse=True)
    merged = np.empty_like(central)
    merged[central] = central[leader[which]]
    corners = merged[model.mesh_face[begin : begin + count]]
    a, b, c = corners.T
    kept = np.flatnonzero((a != b) & (b != c) & (c != a))
    model.mesh_face[begin : begin + len(kept)] = corners[kept]
    for name in ("mesh_facenormal", "mesh_facetexcoord"):
        values = getattr(model, name)
        values[begin : begin + len(kept)] = values[begin + kept]
    model.mesh_facenum[mesh] = len(kept)


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
