"""Point clouds from depth pictures: in the robot's base frame, cropped, downsampled to N points.

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

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Count, Number, Positive
from embodied.core.build import ConfigError

Array = NDArray[np.float64]
DECIMALS = 7
Corner = tuple[Number, Number, Number]


@dataclass(frozen=True)
class Sampling:
    """Which points of what cameras see a cloud keeps."""

    points: Count = 256  # points N of a cloud
    voxel: Positive = 0.01  # at most one point in a cube of this side, m
    low: Corner = (0.20, -0.45, 0.005)  # corner of the box of points, base frame, m
    high: Corner = (0.80, 0.45, 0.60)  # opposite corner, m

    def __post_init__(self) -> None:
        if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
            raise ConfigError(f"the box from {self.low} to {self.high} is empty")


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
    inverse = cast(Tensor, torch.linalg.inv(matrix.double()))  # pyright: ignore
    ray = pixel @ inverse.mT
    there = ray * depth.reshape(rows, -1, 1).double()
    pose = pose.double()
    return there @ pose[:, :3, :3].mT + pose[:, None, :3, 3]


def thinned(points: Tensor, colours: Tensor | None, config: Sampling) -> Tensor:
    """Clouds [B, N, 3 or 6] (float32) of points [B, M, 3] and colours [B, M, 3] in [0, 1]. Points
    that are not finite or not in the box do not count."""
    values = points if colours is None else torch.cat([points, colours.to(points)], 2)
    values = values.double()
    means, valid = _voxels(values, in_box(points.double(), config), config.voxel)
    index = farthest(means[..., :3], valid, config.points)
    return torch.gather(means, 1, index[..., None].expand(-1, -1, means.shape[2])).float()


def in_box(points: Tensor, config: Sampling) -> Tensor:
    """Which of the points [B, M, 3] are finite and in the box, [B, M]."""
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
    # One number says row and voxel: sorting numbers is many times faster than sorting vectors.
    last = torch.cat([cell, cell.new_zeros(1, 3)]).amax(0)
    sides: list[int] = (last + 1).tolist()  # pyright: ignore
    if rows * math.prod(sides) >= 2**63:
        raise ConfigError(f"voxel={size:g} m is too small for these points: {sides} voxels")
    key = which
    for axis, side in enumerate(sides):
        key = key * side + cell[:, axis]
    found = torch.unique(key, return_inverse=True)  # pyright: ignore
    voxel, inverse = cast(tuple[Tensor, Tensor], found)
    row = voxel // math.prod(sides)
    total = inside.new_zeros(len(voxel), channels).index_add_(0, inverse, inside)
    count = inside.new_zeros(len(voxel)).index_add_(0, inverse, torch.ones_like(inside[:, 0]))
    number = torch.bincount(row, minlength=rows)
    within = torch.arange(len(voxel), device=values.device)
    within = within - (number.cumsum(0) - number)[row]
    most = max(int(number.max()), 1)
    means = values.new_zeros(rows, most, channels)
    means[row, within] = (total / count[:, None]).round(decimals=DECIMALS)
    return means, torch.arange(most, device=values.device) < number[:, None]


def farthest(points: Tensor, valid: Tensor, count: int) -> Tensor:
    """The indices [B, count] (int64, rising) of the points to keep of `points` [B, V, 3], those
    `valid` [B, V] first in their row: the first one, then always the one that is farthest from all
    kept ones. A row with fewer valid points gets them all, then the same again."""
    rows, total = valid.shape
    kept = torch.zeros(rows, count, dtype=torch.int64, device=points.device)
    every = torch.arange(rows, device=points.device)
    axes = points.mT.contiguous()  # sums along the last axis of three would be slow
    nearest = torch.where(valid, torch.inf, -torch.inf).to(points)
    for i in range(1, min(count, total)):
        away = (axes - axes[every, :, kept[:, i - 1]][..., None]).square_().sum(1)
        torch.minimum(nearest, away, out=nearest)
        kept[:, i] = nearest.argmax(1)
    number = valid.sum(1, keepdim=True)
    turn = torch.arange(count, device=points.device) % number.clamp(min=1)
    return torch.where(number < count, turn, kept.sort(1).values)


def cloud(points: Array, colours: Array | None, config: Sampling) -> NDArray[np.float32]:
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
        return np.zeros((config.points, 3 if colours is None else 6), np.float32)
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
