"""Solids: upright boxes and cylinders on a table, cast by rays, tested for grasps and placements.

A shape is one or two primitives whose axes are vertical, so an object has a place and a yaw. A
grasp is a tool pose (between the finger pads: y is the closing axis, z the approach) and an
opening. It is antipodal where the closing line meets the same object from both sides, inside of
both friction cones, and no finger or palm is in a solid:

    n_1 . y >= cos(atan mu),   n_2 . (-y) >= cos(atan mu)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied.embodiments.fr3 import OPEN, hand_points, opening

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Primitive = tuple[str, tuple[float, float, float], tuple[float, float, float]]


def _box(x: float, y: float, z: float, at: tuple[float, float, float] = (0, 0, 0)) -> Primitive:
    """A box of half sides x, y, z (m) whose underside has its middle at `at`."""
    return "box", (x, y, z), at


def _can(r: float, z: float, at: tuple[float, float, float] = (0, 0, 0)) -> Primitive:
    """A cylinder of radius r and half height z (m) whose underside has its middle at `at`."""
    return "can", (r, r, z), at


SHAPES: tuple[tuple[Primitive, ...], ...] = (
    (_box(0.020, 0.020, 0.020),),
    (_box(0.015, 0.040, 0.020),),
    (_box(0.025, 0.055, 0.015),),
    (_box(0.030, 0.030, 0.030),),
    (_box(0.012, 0.025, 0.045),),
    (_box(0.055, 0.060, 0.012), _box(0.014, 0.020, 0.015, (0, 0, 0.024))),
    (_can(0.018, 0.020),),
    (_can(0.025, 0.035),),
    (_can(0.032, 0.020),),
    (_can(0.015, 0.050),),
    (_can(0.055, 0.010), _can(0.016, 0.018, (0, 0, 0.020))),
    (_box(0.015, 0.045, 0.018), _box(0.025, 0.015, 0.018, (0.040, 0.030, 0))),
    (_box(0.015, 0.045, 0.018), _box(0.025, 0.014, 0.018, (0.040, 0, 0))),
    (_box(0.045, 0.045, 0.015), _can(0.018, 0.018, (0, 0, 0.030))),
    (_can(0.028, 0.018), _box(0.030, 0.010, 0.010, (0.048, 0, 0))),
    # Held out of training.
    (_box(0.018, 0.030, 0.028),),
    (_can(0.022, 0.028),),
    (_box(0.050, 0.055, 0.011), _can(0.020, 0.020, (0, 0, 0.022))),
    (_box(0.014, 0.050, 0.022), _box(0.024, 0.014, 0.022, (0.038, -0.036, 0))),
    (_can(0.052, 0.012), _box(0.015, 0.024, 0.016, (0, 0, 0.024))),
)
"""The primitives of each shape, and where they are above the middle of its underside (m)."""
HELD_OUT = 5  # how many of SHAPES, the last ones, are for evaluation
CELLS = tuple((x, y) for x in (0.40, 0.52, 0.64) for y in (-0.24, -0.12, 0.0, 0.12, 0.24))
"""Middles of the cells of the table in which objects stand, one in each (m)."""
JITTER = 0.018  # how far from the middle of its cell an object stands, m
COSINE = math.cos(math.atan(0.5))  # of the friction cone
TILTS = (0.0, math.radians(30), math.radians(-30))  # turns of the approach about the closing axis


@dataclass
class Solids:
    """The P primitives of one scene; `owner` [P] says of which object."""

    round: Flags  # [P]: a cylinder
    half: Array  # [P, 3], m
    centre: Array  # [P, 3], m
    yaw: Array  # [P], rad
    owner: NDArray[np.int64]  # [P]

    def cast(self, origin: Array, ray: Array) -> tuple[Array, NDArray[np.int64], Array]:
        """Distance [R] (m, infinite: nothing met), primitive [R] and outward normal [R, 3] of the
        first solid that rays [R, 3] of length 1 from outside of all solids meet."""
        o = self._local(origin[:, None] - self.centre)
        d = self._local(np.broadcast_to(ray[:, None], o.shape))
        safe = np.where(np.abs(d) < 1e-9, 1e-9, d)
        near = (-np.sign(safe) * self.half - o) / safe
        far = (np.sign(safe) * self.half - o) / safe
        # A cylinder's mantle: |o + t d| = r in the plane, in place of the slabs in x and y.
        a = np.maximum((d[..., :2] ** 2).sum(2), 1e-12)
        b = (o[..., :2] * d[..., :2]).sum(2)
        c = (o[..., :2] ** 2).sum(2) - self.half[:, 0] ** 2
        root = b * b - a * c
        width = np.sqrt(np.maximum(root, 0))
        mantle_near = np.where(root > 0, (-b - width) / a, np.inf)
        mantle_far = np.where(root > 0, (-b + width) / a, -np.inf)
        for axis in (0, 1):
            near[..., axis] = np.where(self.round, mantle_near, near[..., axis])
            far[..., axis] = np.where(self.round, mantle_far, far[..., axis])
        enter = near.max(2)
        met = (enter <= far.min(2)) & (enter > 0)
        distance = np.where(met, enter, np.inf)
        which = distance.argmin(1)
        rows = np.arange(len(origin))
        axis = near[rows, which].argmax(1)
        normal = np.zeros((len(origin), 3))
        normal[rows, axis] = -np.sign(d[rows, which, axis])
        mantle = self.round[which] & (axis < 2)
        reach = distance[rows, which]
        point = o[rows, which] + np.where(np.isfinite(reach), reach, 0)[:, None] * d[rows, which]
        normal[mantle, :2] = point[mantle, :2] / self.half[which[mantle], :1]
        normal[mantle, 2] = 0
        return reach, which, turned(normal, self.yaw[which])

    def contains(self, points: Array, margin: float = 0.0) -> Flags:
        """[..., P]: which solids, grown by `margin` (m), the points [..., 3] are in."""
        inside = np.abs(self._local(points[..., None, :] - self.centre))
        beyond = inside - self.half < margin
        ring = np.hypot(inside[..., 0], inside[..., 1]) < self.half[:, 0] + margin
        return np.where(self.round, ring, beyond[..., 0] & beyond[..., 1]) & beyond[..., 2]

    def _local(self, vector: Array) -> Array:
        return turned(vector, -self.yaw)


def turned(vector: Array, yaw: Array) -> Array:
    """`vector` [..., 3] turned about the vertical by `yaw` [...] (rad)."""
    cos = np.cos(yaw)
    sin = np.sin(yaw)
    x = cos * vector[..., 0] - sin * vector[..., 1]
    y = sin * vector[..., 0] + cos * vector[..., 1]
    return np.stack([x, y, np.broadcast_to(vector[..., 2], x.shape)], -1)


def solids(shape: NDArray[np.int64], place: Array, yaw: Array) -> Solids:
    """The scene of objects of the shapes [n] at places [n, 2] (m) with yaws [n] (rad)."""
    parts = [(i, *part) for i, kind in enumerate(shape) for part in SHAPES[kind]]
    owner = np.array([part[0] for part in parts], np.int64)
    half = np.array([part[2] for part in parts]).reshape(-1, 3)
    at = np.array([part[3] for part in parts]).reshape(-1, 3) + half * (0, 0, 1)
    centre = turned(at, yaw[owner])
    centre[:, :2] += place[owner]
    rounded = np.array([part[1] == "can" for part in parts], np.bool_)
    return Solids(rounded, half, centre, yaw[owner], owner)


def antipodal(scene: Solids, place: Array, turn: Array, width: Array) -> Flags:
    """[G]: which grasps at tool poses `place` [G, 3], `turn` [G, 3, 3], for something `width` [G]
    (m) wide, are antipodal and free."""
    y = turn[:, :, 1]
    wide = opening(width)
    first, one, n1 = scene.cast(place + wide[:, None] / 2 * y, -y)
    second, other, n2 = scene.cast(place - wide[:, None] / 2 * y, y)
    meets = (first < wide) & (second < wide) & (scene.owner[one] == scene.owner[other])
    cone = ((n1 * y).sum(1) >= COSINE) & (-(n2 * y).sum(1) >= COSINE)
    hand = hand_points(place, turn, wide)
    free = ~scene.contains(hand).any((1, 2)) & (hand[..., 2] > 0.0005).all(1)
    return meets & cone & free


def frames(closing: Array, approach: Array) -> Array:
    """Rotations [G, 3, 3] of tools that close along `closing` and approach along `approach`."""
    return np.stack([np.cross(closing, approach), closing, approach], 2)


def contact_labels(scene: Solids, points: Array, which: NDArray[np.int64], normal: Array) -> Array:
    """[N, 8] for surface points [N, 3] of the primitives `which` [N] (-1: the table): 1 + the
    object (0: no grasp begins here), closing axis, approach and width of the grasp whose one pad
    meets the point; the approach is the first of TILTS that is free."""
    label = np.zeros((len(points), 8))
    side = np.flatnonzero((which >= 0) & (np.abs(normal[:, 2]) < 0.2))
    if not len(side):
        return label
    at = points[side]
    closing = -normal[side]
    back, _, _ = scene.cast(at + OPEN * closing, -closing)
    width = OPEN - np.where(np.isfinite(back), back, OPEN)
    place = at + width[:, None] / 2 * closing
    open_left = width > 0.004
    down = np.array([0.0, 0.0, -1.0])
    for tilt in TILTS:
        approach = np.cos(tilt) * down + np.sin(tilt) * np.cross(closing, down)
        good = open_left & antipodal(scene, place, frames(closing, approach), width)
        rows = side[good]
        label[rows, 0] = 1 + scene.owner[which[rows]]
        label[rows, 1:4] = closing[good]
        label[rows, 4:7] = approach[good]
        label[rows, 7] = width[good]
        open_left &= ~good
    return label


def free_places(
    scene: Solids, held: Array, place: Array, yaw: Array, low: Array, high: Array
) -> Flags:
    """[G]: where an object whose surface has the points `held` [M, 3] (m, above the middle of its
    underside) stands free by 1 cm at `place` [G, 3] on the table, turned by `yaw` [G] (rad), in the
    box from `low` to `high` [2] (m)."""
    there = turned(held[None], yaw[:, None]) + place[:, None]
    there[..., 2] += 0.003
    inside = ((there[..., :2] >= low) & (there[..., :2] <= high)).all((1, 2))
    return inside & (np.abs(place[:, 2]) < 0.01) & ~scene.contains(there, 0.01).any((1, 2))
