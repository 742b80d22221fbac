"""Off-screen rendering of MuJoCo scenes (EGL), initialised on first use.

Point clouds from depth images are in the robot's base frame, cropped, downsampled to N points:

    p_base = T (depth K^-1 [u + 1/2, v + 1/2, 1]),   T: camera (x right, y down, z ahead) to base

then the mean of each voxel, then farthest-point sampling (Qi et al., PointNet++, 2017). Two
implementations give the same points: Open3D for one cloud on a CPU (and for real cameras), torch
for batches on a GPU. Conventions of both: the voxel grid starts half a voxel below the lowest
corner of the cropped cloud (as in Open3D), voxels are ordered by their x, y, z index, means are
rounded to 0.1 micrometres, the first voxel is the first farthest point, and selected points keep
that order. A cloud with fewer than N points repeats them in turn (no effect on a max-pool); an
empty cloud is N zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Count, Number, Positive
from embodied.core.build import ConfigError
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
        focal = height / 2 / np.tan(np.radians(model.cam_fovy[camera]) / 2)
        matrix = np.array([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1.0]])
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


Array = NDArray[np.float64]
DECIMALS = 7


@dataclass(frozen=True)
class Pinhole:
    """A camera at one moment: `matrix` K [3, 3] (pixels), `pose` T [4, 4] (m), camera to base."""

    matrix: Array
    pose: Array


Corner = tuple[Number, Number, Number]


@dataclass(frozen=True)
class Config:
    """Settings of a point cloud."""

    points: Count = 256  # points N of a cloud
    voxel: Positive = 0.01  # at most one point in a cube of this side, m
    low: Corner = (0.20, -0.45, 0.005)  # corner of the box of points, base frame, m
    high: Corner = (0.80, 0.45, 0.60)  # opposite corner, m
    colour: bool = False  # adds red, green, blue in [0, 1]

    def __post_init__(self) -> None:
        if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
            raise ConfigError(f"the box from {self.low} to {self.high} is empty")

    @property
    def channels(self) -> int:
        return 6 if self.colour else 3


def unproject(depth: Tensor, matrix: Tensor, pose: Tensor) -> Tensor:
    """Points [B, H * W, 3] in the base frame, m, of depths [B, H, W] along the viewing axis (m)
    seen through `matrix` [B, 3, 3] from `pose` [B, 4, 4]; float64."""
    rows, height, width = depth.shape
    v, u = torch.meshgrid(
        torch.arange(height, device=depth.device, dtype=torch.float64) + 0.5,
        torch.arange(width, device=depth.device, dtype=torch.float64) + 0.5,
        indexing="ij",
    )
    pixel = torch.stack([u, v, torch.ones_like(u)], -1).view(1, -1, 3)
    ray = pixel @ torch.linalg.inv(matrix.double()).mT
    there = ray * depth.reshape(rows, -1, 1).double()
    pose = pose.double()
    return there @ pose[:, :3, :3].mT + pose[:, None, :3, 3]


def thinned(points: Tensor, colours: Tensor | None, config: Config) -> Tensor:
    """Clouds [B, N, 3 or 6] (float32) of points [B, M, 3] and colours [B, M, 3] in [0, 1].

    Points that are not finite or not in the box do not count.
    """
    values = points if colours is None else torch.cat([points, colours.to(points)], 2)
    values = values.double()
    means, valid = _voxels(values, _inside(points.double(), config), config.voxel)
    index = farthest(means[..., :3], valid, config.points)
    return torch.gather(means, 1, index[..., None].expand(-1, -1, means.shape[2])).float()


def _inside(points: Tensor, config: Config) -> Tensor:
    low, high = (points.new_tensor(corner) for corner in (config.low, config.high))
    return ((points >= low) & (points <= high)).all(2)


def _voxels(values: Tensor, valid: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Means [B, V, C] of the voxels of each row in the order of their index, and which of them are
    real [B, V]; V is the most of any row, and at least 1."""
    rows, _, channels = values.shape
    points = values[..., :3]
    low = torch.where(valid[..., None], points, torch.inf).amin(1, keepdim=True)
    which, place = valid.nonzero(as_tuple=True)
    inside = values[which, place]
    cell = ((inside[:, :3] - (low[which, 0] - size / 2)) / size).floor().long()
    voxel, inverse = torch.unique(torch.cat([which[:, None], cell], 1), dim=0, return_inverse=True)
    total = inside.new_zeros(len(voxel), channels).index_add_(0, inverse, inside)
    count = inside.new_zeros(len(voxel)).index_add_(0, inverse, torch.ones_like(inside[:, 0]))
    number = torch.bincount(voxel[:, 0], minlength=rows)
    within = torch.arange(len(voxel), device=values.device)
    within = within - (number.cumsum(0) - number)[voxel[:, 0]]
    most = max(int(number.max()), 1)
    means = values.new_zeros(rows, most, channels)
    means[voxel[:, 0], within] = (total / count[:, None]).round(decimals=DECIMALS)
    return means, torch.arange(most, device=values.device) < number[:, None]


def farthest(points: Tensor, valid: Tensor, count: int) -> Tensor:
    """The indices [B, count] (int64, rising) of the points to keep of `points` [B, V, 3], those
    `valid` [B, V] first in their row: the first one, then always the one that is farthest from all
    kept ones.

    A row with fewer valid points gets them all, then the same again.
    """
    rows, total = valid.shape
    kept = torch.zeros(rows, count, dtype=torch.int64, device=points.device)
    every = torch.arange(rows, device=points.device)
    nearest = torch.where(valid, torch.inf, -torch.inf).to(points)
    for i in range(1, min(count, total)):
        away = (points - points[every, kept[:, i - 1]][:, None]).square().sum(2)
        nearest = torch.minimum(nearest, away)
        kept[:, i] = nearest.argmax(1)
    number = valid.sum(1, keepdim=True)
    turn = torch.arange(count, device=points.device) % number.clamp(min=1)
    return torch.where(number < count, turn, kept.sort(1).values)


def cloud(points: Array, colours: Array | None, config: Config) -> NDArray[np.float32]:
    """One cloud [N, 3 or 6] of points [M, 3] (m, base frame), by Open3D: as `thinned` has it."""
    try:
        import open3d as o3d
    except ModuleNotFoundError as error:
        raise ConfigError(
            "point clouds on the CPU need Open3D: pip install 'embodied-rl[points]'"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"Open3D cannot start ({error}); install the system package libusb-1.0-0"
        ) from error
    whole = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(np.ascontiguousarray(points)))
    if colours is not None:
        whole.colors = o3d.utility.Vector3dVector(np.ascontiguousarray(colours, np.float64))
    whole = whole.remove_non_finite_points()
    part = whole.crop(o3d.geometry.AxisAlignedBoundingBox(config.low, config.high))
    if part.is_empty():
        return np.zeros((config.points, config.channels), np.float32)
    low = part.get_min_bound() - config.voxel / 2
    part = part.voxel_down_sample(config.voxel)
    # `select_by_index` would keep the order that the voxels came in.
    order = np.lexsort(np.floor((np.asarray(part.points) - low) / config.voxel).T[::-1])
    part.points = o3d.utility.Vector3dVector(np.asarray(part.points)[order].round(DECIMALS))
    if colours is not None:
        part.colors = o3d.utility.Vector3dVector(np.asarray(part.colors)[order].round(DECIMALS))
    if len(part.points) > config.points:
        part = part.farthest_point_down_sample(config.points, 0)
    values = np.asarray(part.points)
    if colours is not None:
        values = np.concatenate([values, np.asarray(part.colors)], 1)
    return values[np.arange(config.points) % len(values)].astype(np.float32)
