"""CartesianDelta: Cartesian delta action space of an arm, with joint position targets, batched.

Differential inverse kinematics with damped least squares and a null-space term towards the home
pose (`embodied.embodiments.kinematics.inverse`). `Ur5eDelta` and `So101Delta` keep the orientation,
or the pitch, of the start of the episode.

The reference pose is an explicit argument and result, so it can be saved. It stays within `lead` of
the measured tool pose, which bounds the contact force.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from embodied.core.bounds import Count, NonNegative, Positive, PositiveFraction
from embodied.embodiments import so101
from embodied.embodiments.arrays import Floats, constant, namespace, shortened
from embodied.embodiments.controller import Controller, Reference
from embodied.embodiments.fr3 import rotation, rotation_error
from embodied.embodiments.kinematics import inverse
from embodied.embodiments.kinematics.arm import Arm, Hand, load_arm
from embodied.embodiments.kinematics.chain import Point

TURNS = {"none": (), "yaw": ("yaw",), "full": ("roll", "pitch", "yaw")}
PITCH = 0.1  # m that a radian of an SO-101's pitch is worth where both cannot be had


@dataclass(frozen=True)
class Motion:
    """Settings of every Cartesian delta action space."""

    dt: Positive = 0.05  # control period, s
    step: Positive = 0.025  # motion of the reference per control step of an action of 1, m
    low: Point = (0.28, -0.30, 0.01)  # lower corner of the tool's box, m
    high: Point = (0.72, 0.30, 0.50)  # upper corner of the tool's box, m
    lead: Positive = 0.04  # how far the reference may be ahead, m
    damping: Positive = 0.02  # of the inverse kinematics, m
    iterations: Count = 2  # of the inverse kinematics per control step
    speed: PositiveFraction = 0.8  # share of the joints' velocity limits


@dataclass(frozen=True)
class Config(Motion):
    """Settings of Cartesian delta actions.

    The reference never runs further than `lead` and `lead_turn` ahead of the measured pose. An arm
    file (`embodied robot describe`) needs `low` and `high`. `weight`: about 0.1 for an arm of fewer
    than six joints, which cannot hold place and turn both.
    """

    turn: Positive = 0.08  # rotation per control step of an action of 1, rad
    turning: Literal["none", "yaw", "full"] = "none"  # rotations that an action has
    lead_turn: Positive = 0.15  # how far the reference may be ahead, rad
    pull: NonNegative = 0.1  # towards the home pose in the null space
    arm: str = "fr3"  # fr3, ur5e, so101, or an arm file
    weight: Positive = 1.0  # what a radian of turn is worth, m/rad


class Delta(Controller):
    """Tool velocity (dx, dy, dz), some `turns`, and the gripper where the arm has one.

    The last action element is the wanted opening of the hand: -1 closed, 1 open.
    """

    def __init__(
        self, motion: Motion, arm: Arm, settings: inverse.Settings, turns: tuple[str, ...] = ()
    ) -> None:
        self.config = motion
        self.arm = arm
        self.settings = settings
        hand = ("gripper",) if arm.hand is not None else ()
        self.names: tuple[str, ...] = ("dx", "dy", "dz", *turns, *hand)

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
        config = self.config
        here, facing, _ = self.arm.forward(q)
        place = reference["place"] + config.step * action[:, :3]
        place = here + shortened(place - here, config.lead)
        place = namespace(q).clip(place, constant(config.low, place), constant(config.high, place))
        turn = self.turned(action, reference["turn"], facing)
        before = reference["q"]
        most = constant(config.speed * self.arm.velocity * config.dt, q)
        follow = inverse.follow
        joints = follow(self.arm, self.settings, place, turn, before, most, config.iterations)
        width = self.arm.hand_width(action, reference["width"], config.dt)
        return joints, width, {"place": place, "turn": turn, "q": joints, "width": width}

    def turned(self, action: Floats, turn: Floats, facing: Floats) -> Floats:
        """The reference's next turn after `turn`, of a tool that is measured to be `facing`."""
        return turn


class CartesianDelta(Delta):
    """The action space of any arm, with rotations as `turning` says."""

    def __init__(self, config: Config) -> None:
        settings = inverse.Settings(config.damping, config.pull, config.weight)
        super().__init__(config, load_arm(config.arm), settings, TURNS[config.turning])
        self.turns = len(TURNS[config.turning])
        self.turn = config.turn
        self.lead_turn = config.lead_turn

    def reach(self, place: Floats, start: Floats | None = None, iterations: int = 12) -> Floats:
        """Joint angles [B, n] that put the tool at `place` [B, 3], pointing down (x forwards)."""
        xp = namespace(place)
        arm = self.arm
        q = xp.tile(constant(arm.home, place), (len(place), 1)) if start is None else start
        turn = xp.broadcast_to(constant(np.diag([1.0, -1.0, -1.0]), place), (len(place), 3, 3))
        settings = inverse.Settings(0.01, 0.3, self.settings.weight)
        for _ in range(iterations):
            q = inverse.within_limits(arm, q + inverse.step(arm, settings, place, turn, q))
        return q

    def turned(self, action: Floats, turn: Floats, facing: Floats) -> Floats:
        turns = self.turns
        if not turns:
            return turn
        # A yaw alone is the last of the three rotations.
        xp = namespace(action)
        unturned = xp.zeros_like(action[:, : 3 - turns])
        vector = xp.concatenate([unturned, self.turn * action[:, 3 : 3 + turns]], 1)
        ahead = rotation_error(rotation(vector) @ turn, facing)
        return rotation(shortened(ahead, self.lead_turn)) @ facing


@dataclass(frozen=True)
class Ur5eConfig(Motion):
    """Settings of Cartesian delta actions of a UR5e."""

    step: Positive = 0.02  # motion of the reference per control step of an action of 1, m
    low: Point = (-0.75, -0.4, 0.15)  # lower corner of the flange's box, m
    high: Point = (-0.3, 0.4, 0.65)  # upper corner of the flange's box, m
    lead: Positive = 0.05  # how far the reference may be ahead, m
    speed: PositiveFraction = 0.4  # share of the joints' velocity limits


class Ur5eDelta(Delta):
    """The action space of a bare UR5e: flange velocity (dx, dy, dz)."""

    def __init__(self, config: Ur5eConfig) -> None:
        settings = inverse.Settings(config.damping, pull=0.0, inside=True)
        super().__init__(config, load_arm("ur5e"), settings)


@dataclass(frozen=True)
class So101Config(Motion):
    """Settings of Cartesian delta actions of a small servo arm."""

    step: Positive = 0.015  # motion of the reference per control step of an action of 1, m
    low: Point = (0.12, -0.22, 0.02)  # lower corner of the tool's box, m
    high: Point = (0.34, 0.22, 0.28)  # upper corner of the tool's box, m
    iterations: Count = 3  # of the inverse kinematics per control step
    speed: PositiveFraction = 0.5  # share of the servos' velocity limits
    jaws: Positive = 0.1  # speed of the jaws, m/s


class So101Delta(Delta):
    """The action space of a small servo arm: tool velocity (dx, dy, dz) and the gripper. Five
    joints hold the tool's place and pitch; the roll stays."""

    def __init__(self, config: So101Config) -> None:
        hand = Hand(so101.OPEN, config.jaws)
        arm = replace(load_arm("so101"), forward=so101.forward, hand=hand)
        settings = inverse.Settings(config.damping, pull=0.0, weight=PITCH, inside=True)
        super().__init__(config, arm, settings)
