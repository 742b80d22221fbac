"""CartesianPose: absolute tool poses as actions, of any arm, batched.

    place_i = low_i + (a_i + 1) / 2 (high_i - low_i)
    turn    = Gram-Schmidt of the two columns in a (6D; Zhou et al. 2019), or the rotation vector
              pi a (rotation matrices in the base frame)

The tool goes to the pose in steps of bounded length, solved by damped least squares
(`embodied.embodiments.kinematics.inverse`). A pose that cannot be reached, or a path through a
singular pose, leaves the arm near it: the joint targets never move faster than `speed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied.core.bounds import Count, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.embodiments.arrays import Floats, constant, namespace, shortened
from embodied.embodiments.controller import Controller, Reference
from embodied.embodiments.fr3 import rotation, rotation_error
from embodied.embodiments.kinematics import inverse
from embodied.embodiments.kinematics.arm import load_arm
from embodied.embodiments.kinematics.chain import Point

ROTATIONS = {
    "6d": ("r11", "r21", "r31", "r12", "r22", "r32"),
    "vector": ("rx", "ry", "rz"),
    "none": (),
}
"""Names of the rotation's part of an action: elements of the matrix, or of the rotation vector."""
PARALLEL = 1e-3  # sine of two columns' angle, and length of one, below which they say no rotation


@dataclass(frozen=True)
class Config:
    """Settings of Cartesian pose actions.

    An arm of fewer than six joints needs a `weight` of about 0.1, or its turn is held rather than
    its place. `rotation`: "vector" (1 is half a turn), "none" (as the episode began).
    """

    arm: str = "fr3"  # fr3, so101, ur5e, or an arm file (`embodied robot describe`)
    dt: Positive = 0.05  # control period, s
    low: Point = (0.28, -0.30, 0.01)  # action -1: lower corner of the tool's box, base frame, m
    high: Point = (0.72, 0.30, 0.50)  # action 1: upper corner, m
    rotation: Literal["6d", "vector", "none"] = "6d"  # how actions say the tool's turn
    pace: Positive = 0.5  # how fast the tool goes to its pose, m/s
    turn_pace: Positive = 1.6  # how fast the tool turns to its pose, rad/s
    speed: PositiveFraction = 0.8  # share of the joints' velocity limits
    lead: Positive = 0.06  # how far the target may be from the measured pose, m
    lead_turn: Positive = 0.3  # how far the target may be from the measured pose, rad
    damping: Positive = 0.02  # of the inverse kinematics, m
    pull: NonNegative = 0.1  # towards the home pose in the null space
    weight: Positive = 1.0  # what a radian of turn is worth, m/rad
    iterations: Count = 2  # of the inverse kinematics per control step

    def __post_init__(self) -> None:
        if not (np.asarray(self.low) < np.asarray(self.high)).all():
            raise ConfigError("cartesian_pose: low must be below high on every axis")


class CartesianPose(Controller):
    """The tool's pose in the base frame, then the opening of the hand (-1 closed, 1 open) where the
    arm has one."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.arm = load_arm(config.arm)
        self.settings = inverse.Settings(config.damping, config.pull, config.weight)
        hand = ("gripper",) if self.arm.hand is not None else ()
        self.names = ("x", "y", "z", *ROTATIONS[config.rotation], *hand)

    def begin(self, q: Floats, width: Floats) -> Reference:
        """The reference of arms that stand at `q` [B, n] with hands `width` [B] m open."""
        place, turn, _ = self.arm.forward(q)
        return {"place": place, "turn": turn, **super().begin(q, width)}

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, n] (rad), hand width [B] (m) and the moved reference, for `action`
        [B, A] in [-1, 1] and measured joint positions `q` [B, n]. Of the reference, `place` is the
        tool at the joint target, `turn` the rotation that was asked for last."""
        config = self.config
        arm = self.arm
        before = reference["q"]
        turn = self.turn(action, reference["turn"])
        place, facing = self._towards(action, turn, q, before)
        most = constant(config.speed * arm.velocity * config.dt, q)
        joints = inverse.descend(arm, self.settings, place, facing, before, most, config.iterations)
        width = arm.hand_width(action, reference["width"], config.dt)
        reached = arm.forward(joints)[0]
        return joints, width, {"place": reached, "turn": turn, "q": joints, "width": width}

    def place(self, action: Floats) -> Floats:
        """The position of the tool that the action means [B, 3] (m)."""
        low, high = constant(self.config.low, action), constant(self.config.high, action)
        return namespace(action).clip(low + (action[:, :3] + 1) / 2 * (high - low), low, high)

    def turn(self, action: Floats, otherwise: Floats) -> Floats:
        """The rotation of the tool that the action means [B, 3, 3]; `otherwise` where the action
        says no rotation."""
        if self.config.rotation == "none":
            return otherwise
        if self.config.rotation == "vector":
            return rotation(np.pi * action[:, 3:6])
        # The rotation [B, 3, 3] whose first two columns are nearest to these, in that order.
        first = action[:, 3:6]
        second = action[:, 6:9]
        xp = namespace(first)
        length = xp.linalg.norm(first, axis=1, keepdims=True)
        x = first / xp.clip(length, 1e-12, None)
        rest = second - (x * second).sum(1)[:, None] * x
        wide = xp.linalg.norm(rest, axis=1, keepdims=True)
        y = rest / xp.clip(wide, 1e-12, None)
        made = xp.stack([x, y, xp.linalg.cross(x, y, axis=1)], 2)
        says = (length > PARALLEL) & (wide > PARALLEL)
        return xp.where(says[:, :, None], made, otherwise)

    def encode(self, place: Floats, turn: Floats) -> Floats:
        """The pose part of the action [B, 3 + m] that means tool poses `place` [B, 3] in the box,
        `turn` [B, 3, 3]."""
        low, high = constant(self.config.low, place), constant(self.config.high, place)
        parts = [2 * (place - low) / (high - low) - 1]
        if self.config.rotation == "6d":
            parts += [turn[:, :, 0], turn[:, :, 1]]
        elif self.config.rotation == "vector":
            parts += [rotation_vector(turn) / np.pi]
        return namespace(place).concatenate(parts, 1)

    def _towards(
        self, action: Floats, turn: Floats, q: Floats, before: Floats
    ) -> tuple[Floats, Floats]:
        """The next tool pose on the way, near the target before and the measured pose."""
        config = self.config
        place, facing, _ = self.arm.forward(before)
        place = place + shortened(self.place(action) - place, config.pace * config.dt)
        ahead = shortened(rotation_error(turn, facing), config.turn_pace * config.dt)
        facing = rotation(ahead) @ facing
        here, measured, _ = self.arm.forward(q)
        place = here + shortened(place - here, config.lead)
        ahead = shortened(rotation_error(facing, measured), config.lead_turn)
        return place, rotation(ahead) @ measured


def rotation_vector(turn: Floats) -> Floats:
    """Rotation vectors [B, 3] (rad) of rotation matrices [B, 3, 3], also of half turns."""
    xp = namespace(turn)
    eye = constant(np.eye(3), turn)
    small = rotation_error(turn, xp.broadcast_to(eye, turn.shape))
    cosine = (turn[:, 0, 0] + turn[:, 1, 1] + turn[:, 2, 2] - 1) / 2
    # Beyond a quarter turn the axis n is read from n n^T, which half turns have too.
    wide = xp.clip(1 - cosine, 0.5, None)[:, None, None]
    square = ((turn + turn.mT) / 2 - cosine[:, None, None] * eye) / wide
    column = xp.argmax(xp.stack([square[:, i, i] for i in range(3)], 1), 1)
    axis = square[xp.arange(len(turn)), :, column]
    axis = axis / xp.clip(_length(axis), 1e-12, None)
    angle = xp.arctan2(xp.linalg.norm(xp.sin(_length(small)), axis=1), cosine)
    sign = xp.where((axis * small).sum(1) < 0, -1.0, 1.0)
    return xp.where((cosine < 0)[:, None], (sign * angle)[:, None] * axis, small)


def _length(vector: Floats) -> Floats:
    return namespace(vector).linalg.norm(vector, axis=1, keepdims=True)
