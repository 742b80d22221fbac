"""Workspace: a box that the tool stays in, and half-spaces (a table, a person's side) to avoid.

The workspace knows one point of the arm, the tool's; `geometry` knows the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from embodied.core.bounds import Number
from embodied.core.build import ConfigError
from embodied.real_robot.control.arm_state import Floats, Place
from embodied.real_robot.safety.region import Region

Forward = Callable[[Floats], Floats]
"""A function of joint positions [k, n]: tool positions [k, 3] (m, base frame)."""


@dataclass(frozen=True)
class Config:
    """A box and half-spaces in the base frame that the tool stays in."""

    low: tuple[Place, Place, Place]  # lower corner of the box, m
    high: tuple[Place, Place, Place]  # upper corner of the box, m
    planes: tuple[tuple[Number, Number, Number, Number], ...] = ()  # a, b, c, d: ax + by + cz >= d

    def __post_init__(self) -> None:
        numbers = [*self.low, *self.high, *(each for plane in self.planes for each in plane)]
        if not np.isfinite(numbers).all():
            raise ConfigError("safety.workspace: low, high and planes should be finite")


class Workspace(Region):
    """The tool's depth is its distance to the nearest side of the box or plane."""

    name: ClassVar[str] = "workspace"

    def __init__(self, config: Config, forward: Forward) -> None:
        low = np.asarray(config.low, float)
        high = np.asarray(config.high, float)
        if not (low < high).all():
            raise ConfigError("safety.workspace: low should be below high on every axis")
        planes = [unit_plane(plane, "safety.workspace") for plane in config.planes]
        axes = np.eye(3)
        self.normals = np.stack([*axes, *-axes, *(plane[:3] for plane in planes)])
        """Unit normals [sides, 3] that point inside."""
        self.offsets = np.array([*low, *-high, *(plane[3] for plane in planes)])
        """Offset [sides] (m) of each side along its normal."""
        self.forward = forward

    def nearest(self, q: Floats) -> tuple[float, str]:
        return self.depth(q[None]), "the tool"

    def depths(self, q: Floats) -> Floats:
        return (self.forward(q) @ self.normals.T - self.offsets).min(1)


def unit_plane(plane: tuple[float, float, float, float], where: str) -> Floats:
    """`plane` (a, b, c, d) with a normal of length 1; ConfigError that names setting `where`."""
    length = float(np.linalg.norm(plane[:3]))
    if not np.isfinite(plane).all() or length < 1e-9:
        raise ConfigError(f"{where}: a plane's normal (a, b, c) should be finite and not zero")
    return np.asarray(plane, float) / length
