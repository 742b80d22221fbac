"""Units of LeRobot's joints and hands, and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from embodied.core.bounds import Bound, Number
from embodied.core.build import ConfigError
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.drivers.lerobot.process import span_of

FULL = 200.0  # from -100 to 100


@dataclass(frozen=True)
class Joint:
    """A joint of LeRobot's and its unit. The unit `range` is from -100 to 100."""

    key: str  # LeRobot's name, as elbow_flex.pos
    unit: Literal["degrees", "radians", "range"] = "degrees"  # unit of LeRobot's values
    zero: Number = 0.0  # LeRobot's value where our joint is at 0 rad
    sign: Literal[-1, 1] = 1  # -1: it turns the other way
    span: Annotated[float, Bound(0.0, 1e4)] = 0.0  # rad of a range; 0: as its calibration file says
    name: str = ""  # our name; empty: made from the key

    def __post_init__(self) -> None:
        if self.span < 0:
            raise ConfigError(f"{self.key}: span should be 0 or more (rad)")


@dataclass(frozen=True)
class Hand:
    """A gripper of LeRobot's."""

    key: str = "gripper.pos"  # LeRobot's name
    closed: Number = 0.0  # LeRobot's value where it is closed
    open: Number = 100.0  # LeRobot's value where it is open
    width: Annotated[float, Bound(above=0.0, high=1.0)] = 0.07  # opening there, m

    def __post_init__(self) -> None:
        if self.closed == self.open or self.width <= 0:
            raise ConfigError("hand: closed and open should differ, and width be above 0")

    def opening(self, value: float) -> float:
        """Opening (m) at LeRobot's `value`."""
        share = (value - self.closed) / (self.open - self.closed)
        return min(max(share, 0.0), 1.0) * self.width

    def value(self, width: float) -> float:
        """LeRobot's value where it is open by `width` m."""
        share = min(max(width / self.width, 0.0), 1.0)
        return self.closed + share * (self.open - self.closed)


class Units:
    """LeRobot's values [n] and our rad [n]. `ready`: what its process said of its calibration.
    ConfigError where a span is not known."""

    def __init__(self, joints: Sequence[Joint], ready: Mapping[str, Any]) -> None:
        self.zero = np.array([joint.zero for joint in joints])
        self.scale = np.array([joint.sign * self._rad(joint, ready) for joint in joints])
        self.ends = [self._ends(joint, ready) for joint in joints]

    def _rad(self, joint: Joint, ready: Mapping[str, Any]) -> float:
        """Angle (rad) of one of the joint's units."""
        if joint.unit == "radians":
            return 1.0
        if joint.unit == "degrees":
            return math.tau / 360
        turns = span_of(ready, joint.key)
        span = joint.span if joint.span else 0.0 if turns is None else turns * math.tau
        if not span:
            raise ConfigError(
                f"{joint.key}: how far it turns is not known; give span (rad) of -100 to 100"
            )
        return span / FULL

    def _ends(self, joint: Joint, ready: Mapping[str, Any]) -> tuple[float, float]:
        """LeRobot's values that calibration found reachable; infinite where nobody knows."""
        turns = span_of(ready, joint.key)
        if joint.unit == "range":
            return -FULL / 2, FULL / 2
        if turns is None or joint.unit == "radians":
            return -math.inf, math.inf
        return -180 * turns, 180 * turns

    def rad(self, values: Floats) -> Floats:
        return (values - self.zero) * self.scale

    def values(self, rad: Floats) -> Floats:
        return self.zero + rad / self.scale

    def reach(self) -> tuple[Floats, Floats] | None:
        """Ours, low and high; None where no end is known."""
        ends = self.rad(np.array(self.ends).T)
        low, high = ends.min(0), ends.max(0)
        return (low, high) if np.isfinite(ends).any() else None
