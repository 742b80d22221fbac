"""CartesianDelta: Cartesian delta action space of an arm, with joint position targets, batched.

Differential inverse kinematics with damped least squares and a null-space term towards the home
pose (`embodied.embodiments.kinematics.inverse`).

The reference pose is an explicit argument and result, so it can be saved. It stays within `lead` of
the measured tool pose, which bounds the contact force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied.core.bounds import Count, NonNegative, Positive, PositiveFraction
from embodied.embodiments.arrays import Floats, constant, namespace, shortened
from embodied.embodiments.controller import Controller, Reference
from embodied.embodiments.fr3 import rotation, rotation_error
from embodied.embodiments.kinematics import inverse
from embodied.embodiments.kinematics.arm import load_arm
from embodied.embodiments.kinematics.chain import Point


@dataclass(frozen=True)
class Config:
    """Settings of Cartesian delta actions.

    The reference never runs further than `lead` and `lead_turn` ahead of the measured pose. An arm
    file (`embodied robot describe`) needs `low` and `high`. `weight`: about 0.1 for an arm of fewer
    than six joints, which cannot hold place and turn both.
    """

    dt: Positive = 0.05  # control period, s
    step: Positive = 0.025  # motion of the reference per control step of an action of 1, m
    turn: Positive = 0.08  # rotation per control step of an action of 1, rad
    turning: Literal["none", "yaw", "full"] = "none"  # rotations that an action has
    low: Point = (0.28, -0.30, 0.01)  # lower corner of the tool's box, m
    high: Point = (0.72, 0.30, 0.50)  # upper corner of the tool's box, m
    lead: Positive = 0.04  # how far the reference may be ahead, m
    lead_turn: Positive = 0.15  # how far the reference may be ahead, rad
    damping: Positive = 0.02  # of the inverse kinematics, m
    pull: NonNegative = 0.1  # towards the home pose in the null space
    iterations: Count = 2  # of the inverse kinematics per control step
    speed: PositiveFraction = 0.8  # share of the joints' velocity limits
    arm: str = "fr3"  # fr3, ur5e, so101, or an arm file
    weight: Positive = 1.0  # what a radian of turn is worth, m/rad


class CartesianDelta(Controller):
    """Tool velocity (dx, dy, dz), some turning, and the gripper where the arm has one.

    The last action element is the wanted opening of the hand: -1 closed, 1 open.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.arm = load_arm(config.arm)
        turning = {"none": (), "yaw": ("yaw",), "full": ("roll", "pitch", "yaw")}
        if config.turning not in turning:
            raise ValueError(f"turning={config.turning!r} is invalid; use none, yaw or full")
        self.settings = inverse.Settings(config.damping, config.pull, config.weight)
        hand = ("gripper",) if self.arm.hand is not None else ()
        self.names: tuple[str, ...] = ("dx", "dy", "dz", *turning[config.turning], *hand)

    def begin(self, q: Floats, width: Floats) -> Reference:
        """The reference of robots that stand at `q` [B, n] with hands `width` [B] m open."""
        place, turn, _ = self.arm.forward(q)
        return {"place": place, "turn": turn, **super().begin(q, width)}

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, n] (rad), hand width target [B] (m) and the moved reference.

        `action` [B, A] in [-1, 1], `q` [B, n] measured joint angles.
        """
        place, turn = self._move_reference(action, q, reference)
        joints = self._joint_targets(place, turn, reference["q"])
        width = self.arm.hand_width(action, reference["width"], self.config.dt)
        return joints, width, {"place": place, "turn": turn, "q": joints, "width": width}

    def reach(self, place: Floats, start: Floats | None = None, iterations: int = 12) -> Floats:
        """Joint angles [B, n] that put the tool at `place` [B, 3], pointing down (x forwards)."""
        xp = namespace(place)
        arm = self.arm
        q = xp.tile(constant(arm.home, place), (len(place), 1)) if start is None else start
        turn = xp.broadcast_to(constant(np.diag([1.0, -1.0, -1.0]), place), (len(place), 3, 3))
        settings = inverse.Settings(0.01, 0.3, self.config.weight)
        for _ in range(iterations):
            q = inverse.within_limits(arm, q + inverse.step(arm, settings, place, turn, q))
        return q

    def _move_reference(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats]:
        """The reference pose after `action`, inside the box and near the measured pose."""
        config = self.config
        xp = namespace(q)
        here, facing, _ = self.arm.forward(q)
        place = reference["place"] + config.step * action[:, :3]
        place = here + shortened(place - here, config.lead)
        place = xp.clip(place, constant(config.low, place), constant(config.high, place))
        if config.turning == "none":
            return place, reference["turn"]
        # A yaw alone is the last of the three rotations.
        turns = len(self.names) - 3 - (self.arm.hand is not None)
        unturned = xp.zeros_like(action[:, : 3 - turns])
        vector = xp.concatenate([unturned, config.turn * action[:, 3 : 3 + turns]], 1)
        turn = rotation(vector) @ reference["turn"]
        ahead = shortened(rotation_error(turn, facing), config.lead_turn)
        return place, rotation(ahead) @ facing

    def _joint_targets(self, place: Floats, turn: Floats, q: Floats) -> Floats:
        """Joint target for a tool pose, within joint and velocity limits of the last target `q`."""
        config = self.config
        most = constant(config.speed * self.arm.velocity * config.dt, q)
        return inverse.follow(self.arm, self.settings, place, turn, q, most, config.iterations)
