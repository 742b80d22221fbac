"""Driver: the interface that reads a robot's joints and sends it joint targets.

A driver knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np

from embodied.core.bounds import Bound, Count, Number
from embodied.real_robot.drivers.springs import stiffness_of
from embodied.real_robot.kernel.arm_state import Floats, Limits
from embodied.real_robot.kernel.driver import ArmDriver, Springs, StopCategory, springs_of

Wait = Annotated[float, Bound(above=0.0, high=3600.0)]
"""A time limit, s."""

MOST_DROOP = 0.05  # rad: an arm that hangs lower than that is pressed down


@dataclass(frozen=True)
class Outside:
    """What programs outside call a robot's joints and its hand, and the units they count them in:
    rad (of the hand: m) = (value - zero) unit. One number each per joint, then of the hand."""

    names: tuple[str, ...]  # as LeRobot's shoulder_pan.pos
    zero: tuple[Number, ...]  # values of joints at 0 rad, and of a closed hand
    unit: tuple[Number, ...]  # rad (m) of a value of 1, sign included
    joints: Count  # number of joints: one less than names where there is a hand

    @property
    def hand(self) -> bool:
        """Whether the last name is the hand's."""
        return len(self.names) > self.joints

    def values(self, q: Floats, width: float) -> Floats:
        """Values outside [k] of joints at `q` [n] (rad) and a hand open by `width` (m)."""
        ours = np.append(q, width) if self.hand else np.asarray(q)
        return np.asarray(self.zero) + ours / np.asarray(self.unit)

    def positions(self, values: Floats) -> Floats:
        """The inverse: rad of each joint, then m of the hand [..., k]."""
        return (np.asarray(values) - np.asarray(self.zero)) * np.asarray(self.unit)


def in_degrees(joints: Sequence[str], opening: float = 0.0) -> Outside:
    """Joints in degrees and, with an `opening` (m), a hand from 0 to 100, as LeRobot counts."""
    names = tuple(f"{name.removesuffix('.pos')}.pos" for name in joints)
    hand = 1 if opening else 0
    return Outside(
        (*names, *("gripper.pos",) * hand),
        (0.0,) * (len(names) + hand),
        (*(float(np.pi / 180),) * len(names), *(opening / 100,) * hand),
        len(names),
    )


class Driver(ArmDriver):
    """What the kernel needs of a driver, and what other programs ask of it. Leaving its context
    stops the arm and lets go of the wire."""

    @property
    def width(self) -> float:
        return 0.0

    def outside(self) -> Outside | None:
        """What programs outside call what this robot measures and takes; None where there are no
        such names. ConfigError where a unit is not known before the robot is connected."""
        return None

    def calibration(self) -> str:
        """What says where the joints are and which way they turn, as text that changes with it;
        empty where the robot knows that itself. A calibration that is new is rehearsed."""
        return ""

    def reach(self) -> tuple[Floats, Floats] | None:
        """Joint positions [n], low and high, that calibration found reachable; None where the
        arm was not calibrated."""
        return None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.close()


class DriverAround(Driver):
    """Around another `driver`, which does what this one does not do itself."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.joints = driver.joints
        self.sensed = driver.sensed
        self.grip = driver.grip

    @property
    def springs(self) -> Springs | None:
        return springs_of(self.driver)

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        return stiffness_of(self.driver)

    def sense(self) -> Floats:
        return self.driver.sense()

    def check(self, limits: Limits) -> None:
        self.driver.check(limits)

    def limit_hand(self, speed: float, force: float) -> None:
        self.driver.limit_hand(speed, force)

    def recover(self) -> None:
        self.driver.recover()

    def cut(self) -> None:
        self.driver.cut()

    def halt(self) -> StopCategory:
        return self.driver.halt()

    def stop(self) -> None:
        self.driver.stop()

    def close(self) -> None:
        self.driver.close()


class RestDroop:
    """A driver's `droop` as it was at the last rest: servos know no gravity, and masses are
    unknown."""

    _droop: Floats

    def unloaded(self, stretch: Floats) -> None:
        """Take `stretch` [n] (rad) as the arm's droop, at most `MOST_DROOP`."""
        np.clip(stretch, -MOST_DROOP, MOST_DROOP, out=self._droop)

    def droop(self, q: Floats) -> Floats:
        """The droop [n] (rad) before the last start, wherever the arm is now."""
        return self._droop
