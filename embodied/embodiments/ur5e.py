"""Universal Robots UR5e without a gripper: kinematics, limits and home pose.

Denavit-Hartenberg parameters of the manufacturer (nominal: the calibration of a single arm differs
by up to a few millimetres). Poses are those of the flange in the base frame of the teach pendant:
at zero the arm points along -x. All functions take a batch of B arms, as numpy arrays or torch
tensors.

    T_i = R_z(q_i) (a_i, 0, d_i) R_x(alpha_i)
"""

from __future__ import annotations

import numpy as np

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


def forward(q: Floats) -> tuple[Floats, Floats, Floats]:
    """Flange position [B, 3] (m), rotation [B, 3, 3] and Jacobian [B, 6, 6] of joint angles [B, 6].

    The Jacobian's first three rows are the flange's linear velocity, the last three the angular
    velocity, both in the base frame, per rad/s of each joint.
    """
    xp = namespace(q)
    turn = xp.broadcast_to(constant(np.eye(3), q), (len(q), 3, 3))
    place = xp.zeros_like(q[:, :3])
    axes, origins = [], []
    for i in range(6):
        axes.append(turn[:, :, 2])
        origins.append(place)
        frame, offset = _link(i, q[:, i])
        place = place + (turn @ offset[:, :, None])[:, :, 0]
        turn = turn @ frame
    axis, origin = xp.stack(axes, 2), xp.stack(origins, 2)
    lever = place[:, :, None] - origin
    return place, turn, xp.concatenate([xp.linalg.cross(axis, lever, axis=1), axis], 1)


def _link(i: int, q: Floats) -> tuple[Floats, Floats]:
    """Rotation [B, 3, 3] and offset [B, 3] of frame i + 1 in frame i."""
    xp, (ca, sa) = namespace(q), _TWISTS[i]
    c, s, one = xp.cos(q), xp.sin(q), xp.ones_like(q)
    rows = [[c, -ca * s, sa * s], [s, ca * c, -sa * c], [0 * one, sa * one, ca * one]]
    frame = xp.stack([xp.stack(row, 1) for row in rows], 1)
    return frame, xp.stack([_A[i] * c, _A[i] * s, _D[i] * one], 1)
