"""Driver: the interface that reads a robot's joints and sends it joint targets.

A driver knows nothing of policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar, Protocol, Self, runtime_checkable

import numpy as np

from embodied.core.bounds import Bound, Count, Number
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits

Wait = Annotated[float, Bound(above=0.0, high=3600.0)]
"""A time limit, s."""

MOST_DROOP = 0.05  # rad: an arm that hangs lower than that is pressed down


class DriverError(RuntimeError):
    """The wire or the robot failed. The text is one line that says which, and what to look at;
    `measured` is what was measured in spite of it."""

    def __init__(self, text: str, measured: ArmState | None = None) -> None:
        super().__init__(text)
        self.measured = measured


class StopCategory(IntEnum):
    """How a stop ends, by IEC 60204-1. Every stop of the safety chain is HELD; what else a driver
    does, it says."""

    POWER_OFF = 0
    """Power is removed at once."""
    BRAKED = 1
    """Braked under power, which is removed at rest."""
    HELD = 2
    """Braked under power, and held with it."""


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


class Driver(ABC):
    """A driver is owned by one process. Leaving its context stops the arm and lets go of the wire.

    A driver whose arm sags under gravity also has the methods of `Droops`, one that
    holds its arm with springs those of `drivers.springs.HasSprings`."""

    joints: tuple[str, ...]
    """Names of the joints, in the order of all arrays [n]."""
    falls_when_released: ClassVar[bool] = False
    """Whether gravity takes the arm down when it is released: a person has to support it."""
    sensed: tuple[str, ...] = ()
    """Names of the numbers of `sense`: places of objects, `success`, forces."""
    grip: float | None = None
    """Least force (N) to which the hand can be limited; 0: it can be limp. None: no hand."""

    @abstractmethod
    def connect(self) -> None:
        """Open the wire and check who is there; nothing moves. DriverError with what to look at."""

    @abstractmethod
    def read(self) -> ArmState:
        """The newest measurement, stamped on this machine's monotonic clock. DriverError."""

    @abstractmethod
    def write(self, q: Floats, width: float) -> None:
        """Send joint targets [n] (rad) and how far the hand should be open (m). DriverError."""

    def hold(self, q: Floats, width: float) -> bool:
        """Hold an arm that is not moved at `q` [n]. False where the robot does something safer by
        itself (a drone lands): the set-point then follows what is measured. DriverError."""
        self.write(q, width)
        return True

    def limit_hand(self, speed: float, force: float) -> None:
        """Move the hand at most at `speed` (m/s) and press with at most `force` (N; no less than
        `grip`) from now on. One that presses with more, and cannot be made softer, is stopped.
        A hand whose force cannot be set does nothing here. DriverError."""
        return

    def cut(self) -> None:
        """Act on an operator's emergency stop. An arm is brought to rest by the limits and held
        (stop category 2); a robot that flies switches off (0). Never raises."""
        return

    def halt(self) -> StopCategory:
        """Let the robot's own controller stop it, because it does not follow a latched stop, or its
        wire fails; `recover` ends that. Returns the category of this stop. Never raises."""
        self.stop()
        return StopCategory.HELD

    def release(self) -> None:
        """Make the arm compliant, so that a person can move it by hand, until `engage`: it carries
        its own weight, or falls (`falls_when_released`). Nothing is written meanwhile. DriverError
        where it cannot be released."""
        raise DriverError(
            f"{type(self).__name__} has no mode in which a person can move it by hand"
        )

    def engage(self) -> None:
        """Hold a released arm again, where it is measured. DriverError."""
        return

    @property
    @abstractmethod
    def width(self) -> float:
        """Measured opening of the hand, m (0 without a hand)."""

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

    def sense(self) -> Floats:
        """The numbers [len(sensed)], at the time of the last `read`."""
        return np.zeros(0)

    def renew(self) -> None:
        """Lay the things of a simulated world out again, because an episode is over."""
        return

    def check(self, limits: Limits) -> None:
        """DriverError where `limits` ask for more than the connected arm itself allows."""
        return

    def recover(self) -> None:
        """Clear what the robot itself latched, and connect again if need be, because an operator
        has reset. It may take seconds, in which no command moves the arm. DriverError."""
        return

    @abstractmethod
    def stop(self) -> None:
        """Hold the arm where it is (stop category 2), from any state; safe to call twice. Never
        raises for a wire that is gone: the robot's own watchdog acts then."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the wire; safe to call twice."""

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.close()


@runtime_checkable
class Droops(Protocol):
    """A driver whose arm sags under gravity, or one around such a driver."""

    def droop(self, q: Floats) -> Floats:
        """Distance [n] (rad) of each joint below its target at `q` [n]: an arm that was sent to
        `q + droop(q)` is measured at `q`."""
        ...

    def unloaded(self, stretch: Floats) -> None:
        """Learn from an arm that rests and touches nothing, `stretch` [n] (rad) below its
        target."""
        ...


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


def droop_of(driver: Driver) -> Callable[[Floats], Floats]:
    """The driver's `droop`; zeros where gravity is compensated."""
    if isinstance(driver, Droops):
        return driver.droop
    return np.zeros_like


def unloaded(driver: Driver, stretch: Floats) -> None:
    """Tell a driver that knows no better that its unloaded arm is `stretch` [n] (rad) below its
    target."""
    if isinstance(driver, Droops):
        driver.unloaded(stretch)
