"""Grasping scenes: one decision on a point cloud, a grasp or a placement, judged by geometry.

One to `objects` objects stand on a table, seen by one depth camera. The action is a tool pose as
of `controller=cartesian_pose`, and the width of what is grasped. In a share `placing` of the scenes
an object is held (`held`, else zeros): the action's place is then where the middle of its underside
goes, and its turn is Rz(yaw) diag(1, -1, -1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import KDTree
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction
from embodied.core.env import StateRoles, Step
from embodied.core.spec import POINTS as CLOUD
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.embodiments.cartesian_pose import CartesianPose
from embodied.embodiments.cartesian_pose import Config as PoseConfig
from embodied.embodiments.fr3 import OPEN
from embodied.envs.batched import BatchedEnv, paint_discs, pixel_grid
from embodied.envs.grasping import solids
from embodied.envs.grasping.solids import CELLS, HELD_OUT, SHAPES, Array, Flags, Solids
from embodied.envs.row_rng import RowRng
from embodied.policies.networks.point_sets import HIGH, LOW, POINTS, sampled

YAWS = 8  # placements are labelled for so many turns of the held object
HELD = 64  # points of the held object
PIXELS = 96  # of the depth camera's side
FAR = 10.0  # m: where rays end that meet nothing, outside of every cloud's box
TARGET = np.array([0.52, 0.0, 0.0])  # what the camera looks at, m
COLOURS = ([200, 60, 50], [80, 110, 170], [60, 150, 90], [200, 150, 50], [130, 80, 160])


@dataclass(frozen=True)
class Config:
    """Settings of the grasping scenes."""

    objects: Count = 5  # most objects of a scene
    shapes: Literal["trained", "held_out"] = "trained"  # which of the shapes stand there
    placing: Fraction = 0.3  # share of scenes in which an object is held
    num_envs: Count = 16  # parallel environments
    seed: CountOrZero = 0  # of the random numbers


class GraspingScenes(BatchedEnv):
    """Observation: `points` [512, 3], `held` [64, 3]; `privileged/contact` [512, 8] and
    `privileged/placement` [512, YAWS] are the labels (`solids.contact_labels`, `free_places`).
    Reward 1 and success: the grasp is antipodal and free, or the placement is free."""

    name = "grasping"
    kept: ClassVar = {"drawn": "drawn", "stream": "streams.state"}

    def __init__(self, config: Config) -> None:
        if config.objects > len(CELLS) - 1:
            raise ValueError(f"objects={config.objects}: at most {len(CELLS) - 1} fit on the table")
        self.config = config
        self.num_envs = config.num_envs
        self.pose = CartesianPose(PoseConfig())
        obs = {
            "points": Leaf((POINTS, 3), unit=CLOUD),
            "held": Leaf((HELD, 3), unit=CLOUD),
            "privileged/contact": Leaf((POINTS, 8)),
            "privileged/placement": Leaf((POINTS, YAWS), low=0.0, high=1.0),
        }
        names = self.pose.names
        act = Leaf((len(names),), low=-1.0, high=1.0, names=names)
        self.spec = Spec(obs, act, 1.0, None, "grasp an object, or put down the one that is held")
        self.streams = RowRng(config.seed, config.num_envs)
        self.drawn = torch.zeros(config.num_envs, len(CELLS) + 4 * config.objects + 7)
        self.scenes: list[Solids] = [_empty()] * config.num_envs
        self.whole: list[Array | None] = [None] * config.num_envs

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        self.drawn[rows] = self.streams.uniform(self.drawn.shape[1], rows).T

    def observe(self, rows: Tensor) -> Tensors:
        parts = [self._build(row) for row in rows.tolist()]
        clouds = sampled(torch.from_numpy(np.stack([seen for seen, _, _ in parts])))
        made: list[tuple[Array, ...]] = []
        for row, near, (seen, which, normal) in zip(rows.tolist(), clouds, parts, strict=True):
            # The mean of a voxel is off the surface: the nearest ray's end is not.
            index = KDTree(seen).query(near.numpy())[1]
            made.append(self._labelled(row, seen[index], which[index], normal[index]))
        keys = ("points", "held", "privileged/contact", "privileged/placement")
        return {
            key: torch.from_numpy(np.stack(leaf)).float()
            for key, leaf in zip(keys, zip(*made, strict=True), strict=True)
        }

    def _build(self, row: int) -> tuple[Array, NDArray[np.int64], Array]:
        """Set up the scene of `row`; the ends [M, 3] of the camera's rays, primitives, normals."""
        cells, rest = np.split(self.drawn[row].double().numpy(), [len(CELLS)])
        most = self.config.objects
        own, (number, *eye, held, held_yaw, holds) = rest[: 4 * most], rest[4 * most :]
        count = 1 + int(number * most * 0.999)
        order = np.argsort(cells)[:count]
        x, y, yaw, kind = own.reshape(4, most)[:, :count]
        place = np.array(CELLS)[order] + solids.JITTER * (2 * np.stack([x, y], 1) - 1)
        scene = solids.solids(self._kinds(kind), place, 2 * np.pi * yaw)
        self.scenes[row] = scene
        self.whole[row] = None
        if holds <= self.config.placing:
            alone = solids.solids(self._kinds(np.array([held])), np.zeros((1, 2)), np.zeros(1))
            alone.centre = solids.turned(alone.centre, np.array(2 * np.pi * held_yaw))
            alone.yaw = alone.yaw + 2 * np.pi * held_yaw
            self.whole[row] = inner_points(alone)
        return seen_by_camera(scene, eye)

    def _kinds(self, uniform: Array) -> NDArray[np.int64]:
        known = len(SHAPES) - HELD_OUT
        low, count = (0, known) if self.config.shapes == "trained" else (known, HELD_OUT)
        return low + (uniform * count * 0.999).astype(np.int64)

    def _labelled(
        self, row: int, points: Array, which: NDArray[np.int64], normal: Array
    ) -> tuple[Array, ...]:
        scene = self.scenes[row]
        whole = self.whole[row]
        contact = np.zeros((POINTS, 8))
        placement = np.zeros((POINTS, YAWS))
        held = np.zeros((HELD, 3))
        if whole is None:
            contact = solids.contact_labels(scene, points, which, normal)
        else:
            held = whole[np.arange(HELD) * len(whole) // HELD]
            table = np.flatnonzero(which < 0)
            for turn in range(YAWS):
                yaw = np.full(len(table), 2 * np.pi * turn / YAWS)
                placement[table, turn] = self._free(scene, whole, points[table], yaw)
        return points, held, contact, placement

    def _free(self, scene: Solids, whole: Array, place: Array, yaw: Array) -> Flags:
        low, high = np.array(LOW[:2]), np.array(HIGH[:2])
        return solids.free_places(scene, whole, place, yaw, low, high)

    def step(self, action: Tensor) -> Step:
        assert self.obs is not None
        values = action.double().numpy().clip(-1, 1)
        place = self.pose.place(values)
        turn = self.pose.turn(values, np.broadcast_to(np.eye(3), (self.num_envs, 3, 3)))
        width = (values[:, -1] + 1) / 2 * OPEN
        won = torch.zeros(self.num_envs, dtype=torch.bool)
        for row, (scene, whole) in enumerate(zip(self.scenes, self.whole, strict=True)):
            one = slice(row, row + 1)
            if whole is None:
                good = solids.antipodal(scene, place[one], turn[one], width[one])
            else:
                yaw = np.arctan2(turn[one, 1, 0], turn[one, 0, 0])
                good = self._free(scene, whole, place[one] * (1, 1, 0), yaw)
            won[row] = bool(good[0])
        ended = torch.ones(self.num_envs, dtype=torch.bool)
        placing = torch.tensor([whole is not None for whole in self.whole])
        log = {"success": won, "placing": placing}
        return self.finish(self.obs, won.float(), ended, ~ended, log)

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({}, {"stream": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """The cloud from above; points where a grasp begins are green, objects by colour."""
        assert self.obs is not None
        picture = torch.full((height, width, 3), 235, dtype=torch.uint8)
        grid = pixel_grid(width, height, (LOW[1], HIGH[1]), (LOW[0], HIGH[0]))
        points = self.obs["points"][row]
        label = self.obs["privileged/contact"][row, :, 0] > 0
        shades = [COLOURS[2] if good else COLOURS[1] for good in label.tolist()]
        above = (points[:, 2] > 0.006).tolist()
        discs = [
            (point[[1, 0]], 0.004, shade if high else [190, 190, 190])
            for point, shade, high in zip(points, shades, above, strict=True)
        ]
        return paint_discs(picture, grid, discs)

    def describe(self, row: int = 0) -> str:
        count = len(np.unique(self.scenes[row].owner))
        held = "" if self.whole[row] is None else "; the hand holds one more"
        return f"{count} objects stand on the table{held}"


def _empty() -> Solids:
    return solids.solids(np.zeros(0, np.int64), np.zeros((0, 2)), np.zeros(0))


def seen_by_camera(scene: Solids, eye: list[float]) -> tuple[Array, NDArray[np.int64], Array]:
    """What a camera at `eye` (azimuth, elevation, distance in [0, 1]) sees: ends of its rays
    [M, 3], primitives [M] (-1: the table) and normals [M, 3]."""
    azimuth = np.radians(-70 + 140 * eye[0])
    elevation = np.radians(35 + 30 * eye[1])
    away = 0.8 + 0.3 * eye[2]
    flat = np.cos(elevation)
    back = np.array([flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(elevation)])
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    up = np.cross(back, right)
    side = np.tan(np.radians(22)) * (2 * (np.arange(PIXELS) + 0.5) / PIXELS - 1)
    u, v = np.meshgrid(side, side)
    rays = (u[..., None] * right + v[..., None] * up - back).reshape(-1, 3)
    rays /= np.linalg.norm(rays, axis=1, keepdims=True)
    origin = np.broadcast_to(TARGET + away * back, rays.shape)
    reach, which, normal = scene.cast(origin, rays)
    table = np.where(rays[:, 2] < 0, -origin[:, 2] / np.minimum(rays[:, 2], -1e-6), np.inf)
    on_table = table < reach
    which = np.where(on_table, -1, which)
    normal[on_table] = (0, 0, 1)
    points = origin + np.minimum(reach, table)[:, None] * rays
    points[~np.isfinite(points).all(1)] = FAR
    return points, which, normal


def inner_points(scene: Solids) -> Array:
    """Points [M, 3] in and on the solids of one object, less the middle of their box and its
    underside."""
    line = np.linspace(-1, 1, 4)
    unit = np.stack(np.meshgrid(line, line, [-1.0, 1.0]), -1).reshape(-1, 3)
    made: list[Array] = []
    for rounded, half, centre, yaw in zip(
        scene.round, scene.half, scene.centre, scene.yaw, strict=True
    ):
        flat = unit / np.maximum(np.hypot(unit[:, 0], unit[:, 1]), 1)[:, None]
        own = np.where([True, True, False], flat, unit) if rounded else unit
        made.append(solids.turned(own * half, yaw) + centre)
    points = np.concatenate(made)
    low, high = points.min(0), points.max(0)
    return points - (*((low + high) / 2)[:2], low[2])
