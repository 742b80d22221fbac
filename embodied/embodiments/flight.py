"""Flight: velocity action space of a drone that follows position set-points, batched.

Position and heading are treated as four prismatic joints: x, y, z (m, z up) and yaw (rad, not
wrapped). The tool pose is the pose of the drone, so limits, workspace and tracking checks for joint
targets apply to set-points as well. All functions take a batch of B drones, as numpy arrays or
torch tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.core.bounds import Positive
from embodied.core.build import registered
from embodied.embodiments.arrays import Floats, constant, namespace, shortened
from embodied.embodiments.controller import Controller, Reference
from embodied.embodiments.kinematics.chain import Point

JOINTS = ("x", "y", "z", "yaw")


@registered("kinematics")
def forward(q: Floats) -> tuple[Floats]:
    """Places [B, 3] (m) of drones whose coordinates are `q` [B, 4]."""
    return (q[:, :3],)


@dataclass(frozen=True)
class Config:
    """Settings of flight by set-points."""

    dt: Positive = 0.05  # control period, s
    speed: Positive = 0.5  # velocity of the set-point at an action of 1, m/s
    low: Point = (-1.0, -1.0, 0.15)  # lower corner of its box, m
    high: Point = (1.0, 1.0, 1.5)  # upper corner of its box, m
    lead: Positive = 0.4  # how far the set-point may be ahead of the drone, m


class Flight(Controller):
    """Velocities of the set-point along the room's axes (vx, vy, vz); the heading stays."""

    names: tuple[str, ...] = ("vx", "vy", "vz")

    def __init__(self, config: Config) -> None:
        if not (np.asarray(config.low) < np.asarray(config.high)).all():
            raise ValueError("flight: low must be below high on every axis")
        self.config = config

    def __call__(
        self, action: Floats, q: Floats, reference: Reference
    ) -> tuple[Floats, Floats, Reference]:
        """Set-points [B, 4], the hand's width [B] (as it was) and the moved reference, for `action`
        [B, 3] in [-1, 1] and measured coordinates `q` [B, 4]."""
        config = self.config
        xp = namespace(q)
        ahead = reference["q"][:, :3] + config.speed * config.dt * action - q[:, :3]
        place = q[:, :3] + shortened(ahead, config.lead)
        # Already outside the box (on the ground): an action of zero does not move it.
        before = reference["q"][:, :3]
        low = xp.minimum(constant(config.low, q), before)
        high = xp.maximum(constant(config.high, q), before)
        place = xp.clip(place, low, high)
        moved = xp.concatenate([place, reference["q"][:, 3:]], 1)
        return moved, reference["width"], {"q": moved, "width": reference["width"]}
