"""The Franka Research 3 with its parallel hand, as data: kinematics, limits, home, MJCF.

The kinematic chain is the manufacturer's (modified Denavit-Hartenberg) one, read as seven frames
that each turn about their own z axis; poses are of the tool point between the finger pads. All
functions work on B robots at once and need numpy only, so that the driver of a real arm and the
simulator share them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

JOINTS = tuple(f"fr3_joint{i}" for i in range(1, 8))
FINGERS = ("finger_joint1", "finger_joint2")
LOWER = np.array([-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159])  # rad
UPPER = np.array([2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159])  # rad
VELOCITY = np.array([2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26])  # rad/s
TORQUE = np.array([87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0])  # N m
HOME = np.array([0.0, -np.pi / 4, 0.0, -3 * np.pi / 4, 0.0, np.pi / 2, np.pi / 4])  # rad
OPEN = 0.08
"""Distance between the pads when the hand is open, m."""
FINGER_SPEED = 0.1
"""Speed of each finger, m/s."""
TOOL = 0.1034
"""Distance from the hand's flange to the tool point between the pads, m."""

_QUARTER = np.pi / 2
# Each joint's frame in the one before: offset (m) and turn about x (rad).
_OFFSETS = np.array(
    [
        [0.0, 0.0, 0.333],
        [0.0, 0.0, 0.0],
        [0.0, -0.316, 0.0],
        [0.0825, 0.0, 0.0],
        [-0.0825, 0.384, 0.0],
        [0.0, 0.0, 0.0],
        [0.088, 0.0, 0.0],
    ]
)
_TWISTS = np.array([0.0, -_QUARTER, _QUARTER, _QUARTER, -_QUARTER, _QUARTER, _QUARTER])
_TOOL_OFFSET = np.array([0.0, 0.0, 0.107 + TOOL])
# An eighth turn, with the seven digits of the model file, so that both agree to rounding.
_TOOL_TURN = -2 * np.arctan2(0.3826834, 0.9238795)


def forward(q: Floats) -> tuple[Floats, Floats, Floats]:
    """Tool position [B, 3] (m), rotation [B, 3, 3] and Jacobian [B, 6, 7] of joint angles [B, 7].

    The Jacobian's first three rows are the tool point's linear velocity, the last three the angular
    velocity, both in the base frame, per rad/s of each joint.
    """
    count = len(q)
    turn, place = np.broadcast_to(np.eye(3), (count, 3, 3)), np.zeros((count, 3))
    axes, origins = np.empty((count, 7, 3)), np.empty((count, 7, 3))
    cos, sin = np.cos(q), np.sin(q)
    for i in range(7):
        place = place + turn @ _OFFSETS[i]
        turn = turn @ (_FIXED[i] @ _about_z(cos[:, i], sin[:, i]))
        axes[:, i], origins[:, i] = turn[:, :, 2], place
    place = place + turn @ _TOOL_OFFSET
    jacobian = np.empty((count, 6, 7))
    jacobian[:, :3] = np.cross(axes, place[:, None] - origins).transpose(0, 2, 1)
    jacobian[:, 3:] = axes.transpose(0, 2, 1)
    return place, turn @ _HAND, jacobian


def rotation_error(target: Floats, actual: Floats) -> Floats:
    """Rotation vector [B, 3] (base frame, rad) that turns `actual` into `target` [B, 3, 3]."""
    relative = target @ actual.transpose(0, 2, 1)
    skew = np.stack(
        [
            relative[:, 2, 1] - relative[:, 1, 2],
            relative[:, 0, 2] - relative[:, 2, 0],
            relative[:, 1, 0] - relative[:, 0, 1],
        ],
        1,
    )
    sine = np.linalg.norm(skew, axis=1) / 2
    cosine = (np.trace(relative, axis1=1, axis2=2) - 1) / 2
    angle = np.arctan2(sine, cosine)
    # For a small turn angle / (2 sine) tends to 1/2.
    return skew * np.where(sine > 1e-9, angle / np.maximum(2 * sine, 1e-12), 0.5)[:, None]


def rotation(vector: Floats) -> Floats:
    """Rotation matrices [B, 3, 3] of rotation vectors [B, 3] (Rodrigues' formula)."""
    angle = np.linalg.norm(vector, axis=1)[:, None, None]
    axis = vector / np.maximum(angle[:, 0], 1e-12)
    cross = np.zeros((len(vector), 3, 3))
    cross[:, 0, 1], cross[:, 0, 2], cross[:, 1, 2] = -axis[:, 2], axis[:, 1], -axis[:, 0]
    cross[:, 1, 0], cross[:, 2, 0], cross[:, 2, 1] = axis[:, 2], -axis[:, 1], axis[:, 0]
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * (cross @ cross)


def mjcf() -> Path:
    """The FR3's MJCF inside the installed `franky_sim` package (meshes: `assets/meshes`)."""
    package = find_spec("franky_sim")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "the FR3 model comes with franky-sim: pip install 'embodied-rl[mujoco]'"
        )
    return Path(package.origin).parent / "assets" / "fr3.xml"


def _about_x(angle: float) -> Floats:
    cos, sin = round(np.cos(angle)), round(np.sin(angle))
    return np.array([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]])


def _about_z(cos: Floats, sin: Floats) -> Floats:
    turn = np.zeros((len(cos), 3, 3))
    turn[:, 0, 0], turn[:, 0, 1] = cos, -sin
    turn[:, 1, 0], turn[:, 1, 1] = sin, cos
    turn[:, 2, 2] = 1.0
    return turn


# The twists are quarter turns: whole numbers, not cosines that are nearly zero.
_FIXED = np.stack([_about_x(angle) for angle in _TWISTS])
_HAND = _about_z(np.array([np.cos(_TOOL_TURN)]), np.array([np.sin(_TOOL_TURN)]))[0]
