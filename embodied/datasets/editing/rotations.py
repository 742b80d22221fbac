"""Ways to write rotations down, and rotation matrices [T, 3, 3]; in radians, without jumps in time.

    quaternion        x, y, z, w (ROS, SciPy)      quaternion_wxyz   w, x, y, z (MuJoCo, SAPIEN)
    6d                first two columns of the matrix (Zhou et al. 2019)
    6d_rows           its first two rows (PyTorch3D, Diffusion Policy, UMI)
    vector            axis times angle             euler             roll, pitch, yaw about x, y, z

A rotation has two quaternions, and angles that are a turn apart are the same: of these the one
nearest to the step before is chosen. `euler` is Rz(yaw) Ry(pitch) Rx(roll).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

NAMES: dict[str, tuple[str, ...]] = {
    "quaternion": ("qx", "qy", "qz", "qw"),
    "quaternion_wxyz": ("qw", "qx", "qy", "qz"),
    "6d": ("r11", "r21", "r31", "r12", "r22", "r32"),
    "6d_rows": ("r11", "r12", "r13", "r21", "r22", "r23"),
    "vector": ("rx", "ry", "rz"),
    "euler": ("roll", "pitch", "yaw"),
}
UNIT = 0.05  # how far the length of a quaternion, or of a matrix column, may be from 1
TURN = 2 * np.pi


def to_matrix(values: Any, kind: str) -> Numbers:
    """Rotation matrices of `values` [T, k]. ValueError where they are no rotations of this kind."""
    values = np.asarray(values, np.float64)
    if kind.startswith("quaternion"):
        x, y, z, w = _unit(values if kind == "quaternion" else np.roll(values, -1, 1)).T
        rows = [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
        return np.stack([np.stack(row, 1) for row in rows], 1)
    if kind.startswith("6d"):
        first = _unit(values[:, :3])
        second = _unit(values[:, 3:])
        second = _unit(second - (first * second).sum(1, keepdims=True) * first)
        made = np.stack([first, second, np.cross(first, second)], 2)
        return made if kind == "6d" else made.swapaxes(1, 2)
    if kind == "vector":
        half = np.linalg.norm(values, axis=1, keepdims=True) / 2
        scale = np.sinc(half / np.pi) / 2  # sin(half) / angle, also where the angle is 0
        return to_matrix(np.concatenate([values * scale, np.cos(half)], 1), "quaternion")
    roll, pitch, yaw = values.T
    zeros, ones = np.zeros_like(roll), np.ones_like(roll)

    def about(rows: list[list[Numbers]]) -> Numbers:
        return np.stack([np.stack(row, 1) for row in rows], 1)

    cosine, sine = np.cos, np.sin
    x = about([[ones, zeros, zeros], [zeros, cosine(roll), -sine(roll)],
               [zeros, sine(roll), cosine(roll)]])  # fmt: skip
    y = about([[cosine(pitch), zeros, sine(pitch)], [zeros, ones, zeros],
               [-sine(pitch), zeros, cosine(pitch)]])  # fmt: skip
    z = about([[cosine(yaw), -sine(yaw), zeros], [sine(yaw), cosine(yaw), zeros],
               [zeros, zeros, ones]])  # fmt: skip
    return z @ y @ x


def from_matrix(matrix: Numbers, kind: str) -> Numbers:
    """`matrix` [T, 3, 3] in numbers [T, k], consecutive in time."""
    if kind.startswith("6d"):
        turned = matrix if kind == "6d" else matrix.swapaxes(1, 2)
        return np.concatenate([turned[:, :, 0], turned[:, :, 1]], 1)
    if kind == "euler":
        return _euler(matrix)
    quaternion = _quaternion(matrix)
    if kind == "vector":
        return _vector(quaternion)
    # The sign that is nearest to the step before; the first has w >= 0.
    begins = np.where(quaternion[:1, 3] < 0, -1.0, 1.0)
    flips = np.where((quaternion[1:] * quaternion[:-1]).sum(1) < 0, -1.0, 1.0)
    steady = quaternion * np.cumprod(np.concatenate([begins, flips]))[:, None]
    return steady if kind == "quaternion" else np.roll(steady, 1, 1)


def _unit(vectors: Numbers) -> Numbers:
    """Vectors of length 1; ValueError for those that are far from it."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    off = np.abs(length - 1) > UNIT
    if off.any() or not np.isfinite(length).all():
        step = int(np.flatnonzero(off | ~np.isfinite(length))[0])
        raise ValueError(f"step {step}: {np.round(vectors[step], 3).tolist()} is not of length 1")
    return vectors / length


def _quaternion(matrix: Numbers) -> Numbers:
    """x, y, z, w of either sign: the row of 4 q q^T whose own element is largest."""
    m = matrix
    trace = m[:, 0, 0] + m[:, 1, 1] + m[:, 2, 2]
    square = np.empty((len(m), 4, 4))
    for i in range(3):
        square[:, i, i] = 1 + 2 * m[:, i, i] - trace
        j, k = (i + 1) % 3, (i + 2) % 3
        square[:, i, j] = square[:, j, i] = m[:, i, j] + m[:, j, i]
        square[:, i, 3] = square[:, 3, i] = m[:, k, j] - m[:, j, k]
    square[:, 3, 3] = 1 + trace
    best = np.argmax(np.diagonal(square, axis1=1, axis2=2), 1)
    row = square[np.arange(len(m)), best]
    return row / np.linalg.norm(row, axis=1, keepdims=True)


def _vector(quaternion: Numbers) -> Numbers:
    """Rotation vectors: beyond half a turn where the step before was near it."""
    quaternion = np.where(quaternion[:, 3:] < 0, -quaternion, quaternion)
    sine = np.linalg.norm(quaternion[:, :3], axis=1)
    angle = 2 * np.arctan2(sine, quaternion[:, 3])
    made = np.empty((len(quaternion), 3))
    before = np.zeros(3)
    for step, axis in enumerate(quaternion[:, :3] / np.maximum(sine, 1e-300)[:, None]):
        if sine[step] < 1e-12:  # no turn, or whole ones about the axis of before
            axis = before / max(float(np.linalg.norm(before)), 1e-300)
        whole = np.round((before @ axis - angle[step]) / TURN)
        before = made[step] = (angle[step] + whole * TURN) * axis
    return made


def _euler(matrix: Numbers) -> Numbers:
    cosine = np.hypot(matrix[:, 0, 0], matrix[:, 1, 0])
    pitch = np.arctan2(-matrix[:, 2, 0], cosine)
    locked = cosine < 1e-9  # roll and yaw turn about one axis: all of it is yaw
    roll = np.where(locked, 0.0, np.arctan2(matrix[:, 2, 1], matrix[:, 2, 2]))
    yaw = np.where(
        locked,
        np.arctan2(-matrix[:, 0, 1], matrix[:, 1, 1]),
        np.arctan2(matrix[:, 1, 0], matrix[:, 0, 0]),
    )
    return np.stack([np.unwrap(roll), pitch, np.unwrap(yaw)], 1)
