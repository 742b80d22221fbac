"""Franka Research 3 with parallel gripper: kinematics, limits, home pose and MJCF.

The kinematic chain uses the manufacturer's modified Denavit-Hartenberg parameters as seven frames,
each rotating about its own z axis. Poses are those of the tool point between the finger pads. All
functions take a batch of B robots, as numpy arrays (enough for a robot driver) or torch tensors.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import registered
from embodied.embodiments.arrays import Floats, constant, namespace

JOINTS = tuple(f"fr3_joint{i}" for i in range(1, 8))
FINGERS = ("finger_joint1", "finger_joint2")
LOWER = np.array([-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159])  # rad
UPPER = np.array([2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159])  # rad
VELOCITY = np.array([2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26])  # rad/s
TORQUE = np.array([87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0])  # N m
STIFFNESS = (2000.0, 2000.0, 2000.0, 2000.0, 800.0, 600.0, 300.0)
"""Of the joint impedance controller, N m/rad."""
DAMPING = (100.0, 100.0, 70.0, 70.0, 25.0, 15.0, 8.0)
"""Of the joint impedance controller, N m s/rad."""
HOME = np.array([0.0, -np.pi / 4, 0.0, -3 * np.pi / 4, 0.0, np.pi / 2, np.pi / 4])  # rad
OPEN = 0.08
"""Distance between the pads when the hand is open, m."""
FINGER_SPEED = 0.1
"""Speed of each finger, m/s."""
TOOL = 0.1034
"""Distance from the hand's flange to the tool point between the pads, m."""
PAD = (0.0085, 0.0095, 0.0085)
"""Half width, thickness and half height of a pad, m."""
CLEARANCE = 0.008
"""Between each pad and an object before the hand closes on it, m."""

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


@registered("kinematics")
def forward(q: Floats) -> tuple[Floats, Floats, Floats]:
    """Tool position [B, 3] (m), rotation [B, 3, 3] and Jacobian [B, 6, 7] of joint angles [B, 7].

    The Jacobian's first three rows are the tool point's linear velocity, the last three the angular
    velocity, both in the base frame, per rad/s of each joint.
    """
    xp = namespace(q)
    offsets = constant(_OFFSETS, q)
    cos = xp.cos(q)
    sin = xp.sin(q)
    with_cos, with_sin, still = constant(_CHAIN, q)
    frames = still + cos[:, :, None, None] * with_cos + sin[:, :, None, None] * with_sin
    turn = xp.broadcast_to(constant(_EYE, q), (len(q), 3, 3))
    place = xp.zeros_like(q[:, :3])
    axes = []
    origins = []
    for i in range(7):
        place = place + turn @ offsets[i]
        turn = turn @ frames[:, i]
        axes.append(turn[:, :, 2])
        origins.append(place)
    place = place + turn @ constant(_TOOL_OFFSET, q)
    axis = xp.stack(axes, 2)
    origin = xp.stack(origins, 2)
    lever = place[:, :, None] - origin
    jacobian = xp.concatenate([xp.linalg.cross(axis, lever, axis=1), axis], 1)
    return place, turn @ constant(_HAND, q), jacobian


def rotation_error(target: Floats, actual: Floats) -> Floats:
    """Rotation vector [B, 3] (base frame, rad) that turns `actual` into `target` [B, 3, 3]."""
    xp = namespace(target)
    relative = target @ actual.mT
    skew = xp.stack(
        [
            relative[:, 2, 1] - relative[:, 1, 2],
            relative[:, 0, 2] - relative[:, 2, 0],
            relative[:, 1, 0] - relative[:, 0, 1],
        ],
        1,
    )
    sine = xp.linalg.norm(skew, axis=1) / 2
    cosine = (relative[:, 0, 0] + relative[:, 1, 1] + relative[:, 2, 2] - 1) / 2
    angle = xp.arctan2(sine, cosine)
    # For a small turn angle / (2 sine) tends to 1/2.
    return skew * xp.where(sine > 1e-9, angle / xp.clip(2 * sine, 1e-12, None), 0.5)[:, None]


def rotation(vector: Floats) -> Floats:
    """Rotation matrices [B, 3, 3] of rotation vectors [B, 3] (Rodrigues' formula)."""
    xp = namespace(vector)
    angle = xp.linalg.norm(vector, axis=1)[:, None, None]
    axis = vector / xp.clip(angle[:, 0], 1e-12, None)
    cross = (axis[:, :, None, None] * constant(_CROSS, vector)).sum(1)
    return constant(_EYE, vector) + xp.sin(angle) * cross + (1 - xp.cos(angle)) * (cross @ cross)


def opening(width: Floats) -> Floats:
    """How far the hand opens (m) before it closes on something `width` (m) wide."""
    return namespace(width).clip(width + 2 * CLEARANCE, 0, OPEN)


def hand_points(place: Floats, turn: Floats, wide: Floats) -> Floats:
    """Points [..., K, 3] on the fingers, `wide` [...] (m) apart, and on the palm of hands at tool
    poses [..., 3], [..., 3, 3]."""
    half = wide[..., None, None] / 2
    own = constant(_HAND_POINTS, wide) + half * constant(_HAND_SIDES, wide)
    return place[..., None, :] + own @ turn.swapaxes(-1, -2)


def mjcf() -> Path:
    """The FR3's MJCF inside the installed `franky_sim` package (meshes: `assets/meshes`)."""
    package = find_spec("franky_sim")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "the FR3 model needs the package franky-sim; type: pip install 'embodied-rl[sim]'"
        )
    return Path(package.origin).parent / "assets" / "fr3.xml"


def _about_x(angle: float) -> NDArray[np.float64]:
    cos, sin = round(np.cos(angle)), round(np.sin(angle))
    return np.array([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]])


def _chain() -> NDArray[np.float64]:
    """The rotations of each frame in the one before, [3, 7, 3, 3]: the parts that go with the
    cosine and with the sine of its joint angle, and the part that stays. The twists are quarter
    turns: whole numbers, not cosines that are nearly zero."""
    fixed = np.stack([_about_x(angle) for angle in _TWISTS])
    return np.stack([fixed @ _ABOUT_Z[0], fixed @ _ABOUT_Z[1], fixed @ _ABOUT_Z[2]])


_EYE = np.eye(3)
# Multiplied by a vector's elements and summed: the matrix that takes the cross product with it.
_CROSS = np.cross(_EYE[:, None], _EYE[None]).mT
_ABOUT_Z = np.stack([np.diag([1.0, 1.0, 0.0]), _CROSS[2], np.diag([0.0, 0.0, 1.0])])
_CHAIN = _chain()
_HAND = np.cos(_TOOL_TURN) * _ABOUT_Z[0] + np.sin(_TOOL_TURN) * _ABOUT_Z[1] + _ABOUT_Z[2]


def _hand() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points [K, 3] of a closed hand in the tool frame (m), and where they go as it opens."""
    x, thickness, z = PAD
    fingers = [
        ((across, side * layer, height), (0.0, side, 0.0))
        for across in (-x, 0.0, x)
        for side in (-1.0, 1.0)
        for layer in (0.0, thickness)
        for height in (z, 0.0, -0.012, -0.024)
    ]
    palm = [
        ((across, along, height - TOOL), (0.0, 0.0, 0.0))
        for across in (-0.03, 0.0, 0.03)
        for along in np.linspace(-0.1, 0.1, 11)
        for height in (0.066, 0.04)
    ]
    points, sides = zip(*fingers, *palm, strict=True)
    return np.array(points), np.array(sides)


_HAND_POINTS, _HAND_SIDES = _hand()
