"""So101Delta: Cartesian delta action space of five-joint servo arms, with joint position targets.

Damped least squares on tool position and pitch (Wampler 1986), dq = J^T (J J^T + damping^2 I)^-1 e.
Pitch and roll keep their values from the start of the episode. The reference stays within `lead` of
the measured tool position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.core.bounds import Count, Positive, PositiveFraction
from embodied.embodiments import so101
from embodied.embodiments.arrays import Floats, constant, namespace, solve
from embodied.embodiments.controller import Controller, Reference
from embodied.embodiments.kinematics.chain import Point

PITCH = 0.1  # m that a radian of pitch is worth where both cannot be had


@dataclass(frozen=True)
class Config:
    """Settings of Cartesian delta actions of a small servo arm."""

    dt: Positive = 0.05  # control period, s
    step: Positive = 0.015  # motion of the reference per control step of an action of 1, m
    low: Point = (0.12, -0.22, 0.02)  # lower corner of the tool's box, m
    high: Point = (0.34, 0.22, 0.28)  # upper corner of the tool's box, m
    lead: Positive = 0.04  # how far the reference may be ahead, m
    damping: Positive = 0.02  # of the inverse kinematics, m
    iterations: Count = 3  # of the inverse kinematics per control step
    speed: PositiveFraction = 0.5  # share of the servos' velocity limits
    jaws: Positive = 0.1  # speed of the jaws, m/s


class So101Delta(Controller):
    """The action space of a small servo arm: tool velocity (dx, dy, dz) and the gripper (-1
    closed, 1 open)."""

    names: tuple[str, ...] = ("dx", "dy", "dz", "gripper")

    def __init__(self, config: Config) -> None:
        self.config = config

    def begin(self, q: Floats, width: Floats) -> Reference:
        """The reference of arms that stand at `q` [B, 5] with jaws `width` [B] m open."""
        place, pitch, _ = so101.forward(q)
        return {"place": place, "pitch": pitch, **super().begin(q, width)}

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Joint targets [B, 5] (rad), jaw width target [B] (m) and the moved reference, for
        `action` [B, 4] in [-1, 1] and measured joint angles `q` [B, 5]."""
        config = self.config
        xp = namespace(q)
        here = so101.forward(q)[0]
        ahead = reference["place"] + config.step * action[:, :3] - here
        length = xp.clip(xp.linalg.norm(ahead, axis=1, keepdims=True), 1e-12, None)
        place = here + ahead * xp.clip(config.lead / length, None, 1.0)
        place = xp.clip(place, constant(config.low, place), constant(config.high, place))
        joints = self.solved(place, reference["pitch"], reference["q"])
        aim = (action[:, -1] + 1) / 2 * so101.OPEN
        change = config.jaws * config.dt
        width = reference["width"] + xp.clip(aim - reference["width"], -change, change)
        moved = {"place": place, "pitch": reference["pitch"], "q": joints, "width": width}
        return joints, width, moved

    def solved(self, place: Floats, pitch: Floats, q: Floats) -> Floats:
        """Joint targets [B, 5] for tools at `place` [B, 3] with `pitch` [B], within the joint and
        velocity limits of the last target `q` [B, 5]."""
        config = self.config
        start = q
        xp = namespace(q)
        most = config.speed * so101.VELOCITY * config.dt
        low, high = constant(so101.LOWER, q), constant(so101.UPPER, q)
        scale = constant([1.0, 1.0, 1.0, PITCH], q)
        for _ in range(config.iterations):
            at, facing, jacobian = so101.forward(q)
            error = xp.concatenate([place - at, (pitch - facing)[:, None]], 1) * scale
            jacobian = jacobian * scale[:, None]
            square = jacobian @ jacobian.mT + constant(config.damping**2 * np.eye(4), q)
            q = q + (jacobian.mT @ solve(square, error[:, :, None]))[:, :, 0]
            q = xp.clip(xp.clip(q, start - most, start + most), low, high)
        return q
