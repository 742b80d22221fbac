"""Universal Robots UR5e without a gripper: kinematics, limits, home pose and shape.

Denavit-Hartenberg parameters of the manufacturer (nominal: the calibration of a single arm differs
by up to a few millimetres). Poses are those of the flange in the base frame of the teach pendant:
at zero the arm points along -x. All functions take a batch of B arms, as numpy arrays or torch
tensors.

    T_i = R_z(q_i) (a_i, 0, d_i) R_x(alpha_i)
"""

from __future__ import annotations

import numpy as np

from embodied.core.build import registered
from embodied.embodiments.arrays import Floats, constant, namespace

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
UPPER = np.array([2 * np.pi, 2 * np.pi, np.pi, 2 * np.pi, 2 * np.pi, 2 * np.pi])  # rad
LOWER = -UPPER
VELOCITY = np.full(6, np.pi)  # rad/s
HOME = np.array([0.0, -np.pi / 2, np.pi / 2, -np.pi / 2, -np.pi / 2, 0.0])  # rad
"""Upper arm upright, forearm level, flange down."""

_A = (0.0, -0.425, -0.3922, 0.0, 0.0, 0.0)  # m
_D = (0.1625, 0.0, 0.0, 0.1333, 0.0997, 0.0996)  # m
_TWISTS = ((0.0, 1.0), (1.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.0, -1.0), (1.0, 0.0))
"""Cosine and sine of alpha."""


@registered("kinematics")
def forward(q: Floats) -> tuple[Floats, Floats, Floats]:
    """Flange position [B, 3] (m), rotation [B, 3, 3] and Jacobian [B, 6, 6] of joint angles [B, 6].

    The Jacobian's first three rows are the flange's linear velocity, the last three the angular
    velocity, both in the base frame, per rad/s of each joint.
    """
    xp = namespace(q)
    turn = xp.broadcast_to(constant(np.eye(3), q), (len(q), 3, 3))
    place = xp.zeros_like(q[:, :3])
    axes = []
    origins = []
    for i in range(6):
        axes.append(turn[:, :, 2])
        origins.append(place)
        frame, offset = _link(i, q[:, i])
        place = place + (turn @ offset[:, :, None])[:, :, 0]
        turn = turn @ frame
    axis = xp.stack(axes, 2)
    origin = xp.stack(origins, 2)
    lever = place[:, :, None] - origin
    return place, turn, xp.concatenate([xp.linalg.cross(axis, lever, axis=1), axis], 1)


def _link(i: int, q: Floats) -> tuple[Floats, Floats]:
    """Rotation [B, 3, 3] and offset [B, 3] of frame i + 1 in frame i."""
    xp = namespace(q)
    (ca, sa) = _TWISTS[i]
    c = xp.cos(q)
    s = xp.sin(q)
    one = xp.ones_like(q)
    rows = [[c, -ca * s, sa * s], [s, ca * c, -sa * c], [0 * one, sa * one, ca * one]]
    frame = xp.stack([xp.stack(row, 1) for row in rows], 1)
    return frame, xp.stack([_A[i] * c, _A[i] * s, _D[i] * one], 1)


# Along each joint's z axis: where upper arm and forearm lie beside the plane of the axes (m).
_UPPER_ARM = 0.138
_FOREARM = 0.007
# (start, end, radius) in each joint's frame, m: rods around the housings. The radii are
# estimates, rounded up; no data sheet or real arm was at hand to check them.
_RODS = (
    (((0, 0, 0.09), (0, 0, 0.1625), 0.075),),
    (
        ((0, 0, 0), (0, 0, _UPPER_ARM), 0.075),
        ((0, 0, _UPPER_ARM), (_A[1], 0, _UPPER_ARM), 0.065),
        ((_A[1], 0, 0.05), (_A[1], 0, _UPPER_ARM), 0.065),
    ),
    (((0, 0, _FOREARM), (_A[2], 0, _FOREARM), 0.06),),
    (((0, 0, _FOREARM), (0, 0, _D[3]), 0.05),),
    (((0, 0, 0), (0, 0, _D[4]), 0.05),),
    (((0, 0, 0.04), (0, 0, 0.065), 0.045),),
)


def mjcf() -> str:
    """The arm of rods, in the base frame of the teach pendant: shapes for geometry checks only, no
    masses of the real arm, no actuators."""
    body = ""
    closing = ""
    for i, name in enumerate(JOINTS):
        above = (_A[i - 1], 0.0, _D[i - 1]) if i else (0.0, 0.0, 0.0)
        cos, sin = _TWISTS[i - 1] if i else (1.0, 0.0)
        angle = float(np.arctan2(sin, cos))
        rods = "".join(
            f'<geom type="capsule" size="{radius}" fromto="{_text(start)} {_text(end)}"/>'
            for start, end, radius in _RODS[i]
        )
        body += (
            f'<body name="{name}" pos="{_text(above)}" euler="{angle!r} 0 0">'
            f'<joint name="{name}" axis="0 0 1" range="{LOWER[i]:.6f} {UPPER[i]:.6f}"/>{rods}'
        )
        closing += "</body>"
    return (
        '<mujoco model="ur5e"><compiler angle="radian"/><worldbody><body name="base">'
        '<geom type="capsule" size="0.085" fromto="0 0 0.04 0 0 0.06"/>'
        f"{body}{closing}</body></worldbody></mujoco>"
    )


def _text(point: tuple[float, float, float]) -> str:
    return " ".join(repr(float(each)) for each in point)
