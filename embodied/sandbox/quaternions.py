"""Quaternions (x, y, z, w) [N, 4] for reward programs, by the names that Isaac Gym's programs use.

A program may call them without an import, or import them from the modules in `MODULES`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

MODULES = (
    *("isaacgym", "isaacgym.torch_utils"),
    *("isaacgymenvs", "isaacgymenvs.utils", "isaacgymenvs.utils.torch_jit_utils"),
)


def quat_mul(a: Tensor, b: Tensor) -> Tensor:
    """The rotation b, then a."""
    ax, ay, az, aw = a.unbind(-1)
    bx, by, bz, bw = b.unbind(-1)
    x = aw * bx + ax * bw + ay * bz - az * by
    y = aw * by - ax * bz + ay * bw + az * bx
    z = aw * bz + ax * by - ay * bx + az * bw
    w = aw * bw - ax * bx - ay * by - az * bz
    return torch.stack([x, y, z, w], -1)


def quat_conjugate(a: Tensor) -> Tensor:
    """The inverse rotation."""
    return torch.cat([-a[..., :3], a[..., 3:]], -1)


def quat_unit(a: Tensor) -> Tensor:
    return normalize(a, dim=-1)


def quat_rotate(q: Tensor, v: Tensor) -> Tensor:
    """Vectors v [N, 3], rotated by q."""
    axis = q[..., :3]
    turned = 2 * torch.linalg.cross(axis, v, dim=-1)
    return v + q[..., 3:] * turned + torch.linalg.cross(axis, turned, dim=-1)


def quat_rotate_inverse(q: Tensor, v: Tensor) -> Tensor:
    """Vectors v [N, 3], rotated by the inverse of q."""
    return quat_rotate(quat_conjugate(q), v)


def quat_from_angle_axis(angle: Tensor, axis: Tensor) -> Tensor:
    """The rotation by `angle` [N] (rad) about `axis` [N, 3]."""
    half = angle[..., None] / 2
    return torch.cat([normalize(axis, dim=-1) * half.sin(), half.cos()], -1)


def quat_diff_rad(a: Tensor, b: Tensor) -> Tensor:
    """The angle [N] (rad) between two rotations, 0 to pi."""
    between = quat_mul(a, quat_conjugate(b))
    return 2 * torch.atan2(between[..., :3].norm(dim=-1), between[..., 3].abs())


def quat_axis(q: Tensor, axis: int = 0) -> Tensor:
    """Axis number `axis` [N, 3] of the rotated frame."""
    basis = torch.zeros_like(q[..., :3])
    basis[..., axis] = 1
    return quat_rotate(q, basis)


def tensor_clamp(t: Tensor, min_t: Tensor, max_t: Tensor) -> Tensor:
    return torch.max(torch.min(t, max_t), min_t)


def to_torch(x: object, dtype: torch.dtype = torch.float, device: str = "cpu") -> Tensor:
    return torch.as_tensor(x, dtype=dtype, device="cpu")


HELPERS = {
    "quat_apply": quat_rotate,
    "quat_mul": quat_mul,
    "quat_conjugate": quat_conjugate,
    "quat_unit": quat_unit,
    "quat_rotate": quat_rotate,
    "quat_rotate_inverse": quat_rotate_inverse,
    "quat_from_angle_axis": quat_from_angle_axis,
    "quat_diff_rad": quat_diff_rad,
    "quat_axis": quat_axis,
    "tensor_clamp": tensor_clamp,
    "to_torch": to_torch,
}
