"""Workspace: a box that the tool stays in, and half-spaces (a table, a person's side) to avoid.

The workspace knows one point of the arm, the tool's; `geometry` knows the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from embodied.core.bounds import Number
from embodied.core.build import ConfigError
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Place
from embodied.real_robot.kernel.chain import Tick

PARTS = 16  # points of a line that are checked at once
ROUNDS = 3  # times that the line is divided: to PARTS^-ROUNDS = 1/4096 of its length
SHARES = np.arange(1, PARTS + 1) / PARTS


class Region(ABC):
    """A stage that keeps an arm inside a set of joint positions.

    A target outside is pulled back along the straight line, in joint space, from the positions sent
    last: to the furthest point of that line before it first leads out. Where no point of it is
    inside, the arm stays where it was sent. An arm that is outside already may only move closer to
    the inside. The limiter takes the same regions as its guards, so that neither the path to a
    target nor a motion to rest leads out.
    """

    name: ClassVar[str]

    @abstractmethod
    def depths(self, q: Floats) -> Floats:
        """Distance [k] (m) of positions `q` [k, n] from the border; negative: outside."""

    def depth(self, q: Floats) -> float:
        """Smallest depth (m) of the positions `q` [k, n]; negative: outside."""
        return float(self.depths(q).min())

    def nearest(self, q: Floats) -> tuple[float, str]:
        """The depth (m) at `q` [n], and the name of what is nearest to the border."""
        return self.depth(q[None]), self.name

    def begin(self, arm: ArmState) -> None:  # noqa: B027
        """Nothing is remembered."""

    def __call__(self, tick: Tick) -> None:
        depth_last, depth_wanted = self.depths(np.stack([tick.last, tick.q]))
        # An arm that is outside already may go to where it is less far outside.
        least_depth = min(0.0, float(depth_last))
        if depth_wanted >= 0 or (least_depth < 0 and depth_wanted > least_depth):
            return
        step = tick.q - tick.last
        inside = 0.0  # share of the step that is allowed
        outside = 1.0  # share of the step that is not
        for _ in range(ROUNDS):
            shares = inside + (outside - inside) * SHARES
            leaves = self.depths(tick.last + shares[:, None] * step) < least_depth
            first = int(np.argmax(leaves)) if leaves.any() else PARTS - 1
            if first > 0:
                inside = float(shares[first - 1])
            outside = float(shares[first])
        np.multiply(step, inside, out=tick.q)
        tick.q += tick.last


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
