"""Ur5eDelta: Cartesian delta action space of six-joint arms without a gripper.

Damped least squares on the flange pose (Wampler 1986), dq = J^T (J J^T + damping^2 I)^-1 e. The
orientation keeps its value from the start of the episode. The reference stays within `lead` of the
measured flange position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.core.bounds import Count, Positive, PositiveFraction
from embodied.embodiments import ur5e
from embodied.embodiments.arrays import Floats, constant, namespace, solve
from embodied.embodiments.controller import Controller, Reference
from embodied.embodiments.fr3 import rotation_error
from embodied.embodiments.kinematics.chain import Point


@dataclass(frozen=True)
class Config:
    """Settings of Cartesian delta actions of a UR5e."""

    dt: Positive = 0.05  # control period, s
    step: Positive = 0.02  # motion of the reference per control step of an action of 1, m
    low: Point = (-0.75, -0.4, 0.15)  # lower corner of the flange's box, m
    high: Point = (-0.3, 0.4, 0.65)  # upper corner of the flange's box, m
    lead: Positive = 0.05  # how far the reference may be ahead, m
    damping: Positive = 0.02  # of the inverse kinematics, m
    iterations: Count = 2  # of the inverse kinematics per control step
    speed: PositiveFraction = 0.4  # share of the joints' velocity limits


class Ur5eDelta(Controller):
    """The action space of a bare UR5e: flange velocity (dx, dy, dz)."""

    names: tuple[str, ...] = ("dx", "dy", "dz")

    def __init__(self, config: Config) -> None:
        self.config = config

    def begin(self, q: Floats, width: Floats) -> Reference:
        """The reference of arms at `q` [B, 6]; `width` [B] is unused (no gripper)."""
        place, turn, _ = ur5e.forward(q)
        copy = namespace(q).asarray
        return {"place": place, "turn": turn, "q": copy(q, copy=True), "width": width}

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, 6] (rad), the width as it was and the moved reference, for `action`
        [B, 3] in [-1, 1] and measured joint angles `q` [B, 6]."""
        config = self.config
        xp = namespace(q)
        here = ur5e.forward(q)[0]
        ahead = reference["place"] + config.step * action - here
        length = xp.clip(xp.linalg.norm(ahead, axis=1, keepdims=True), 1e-12, None)
        place = here + ahead * xp.clip(config.lead / length, None, 1.0)
        place = xp.clip(place, constant(config.low, place), constant(config.high, place))
        joints = self.solved(place, reference["turn"], reference["q"])
        return joints, reference["width"], {**reference, "place": place, "q": joints}

    def solved(self, place: Floats, turn: Floats, q: Floats) -> Floats:
        """Joint targets [B, 6] for flanges at `place` [B, 3], `turn` [B, 3, 3], within the
        joint and velocity limits of the last target `q` [B, 6]."""
        config = self.config
        start = q
        xp = namespace(q)
        most = constant(config.speed * ur5e.VELOCITY * config.dt, q)
        low, high = constant(ur5e.LOWER, q), constant(ur5e.UPPER, q)
        for _ in range(config.iterations):
            at, facing, jacobian = ur5e.forward(q)
            error = xp.concatenate([place - at, rotation_error(turn, facing)], 1)
            square = jacobian @ jacobian.mT + constant(config.damping**2 * np.eye(6), q)
            q = q + (jacobian.mT @ solve(square, error[:, :, None]))[:, :, 0]
            q = xp.clip(xp.clip(q, start - most, start + most), low, high)
        return q
