"""What the kernel needs of a driver, which reads a robot's joints and sends it joint targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits


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


class ArmDriver(ABC):
    """A driver is owned by one process.

    A driver whose arm sags under gravity also has the methods of `Droops`, one that holds its arm
    with springs those of `HasSprings`."""

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


def droop_of(driver: ArmDriver) -> Callable[[Floats], Floats]:
    """The driver's `droop`; zeros where gravity is compensated."""
    if isinstance(driver, Droops):
        return driver.droop
    return np.zeros_like


def unloaded(driver: ArmDriver, stretch: Floats) -> None:
    """Tell a driver that knows no better that its unloaded arm is `stretch` [n] (rad) below its
    target."""
    if isinstance(driver, Droops):
        driver.unloaded(stretch)


Frame = Literal["joints", "tool"]


@dataclass(frozen=True)
class Springs:
    """Springs on the joints [n], or on the tool [6], that hold an arm between two set-points:
    torque = K (q_d - q) - D dq; force = K (x_d - x) - D v."""

    frame: Frame
    stiffness: Floats
    """N m/rad of each joint; of the tool N/m (x, y, z), N m/rad (the turn about them)."""
    damping: Floats
    """N m s/rad of each joint; of the tool N s/m, N m s/rad."""
    stretch: Floats
    """Stretch (rad, m) of each beyond which its pull grows no more."""


@runtime_checkable
class HasSprings(Protocol):
    """A driver that may hold its arm with springs, or one around such a driver."""

    @property
    def springs(self) -> Springs | None:
        """The springs as they were set up; None where the arm is held stiffly, or not known."""
        ...

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        """Lowest and highest stiffness [m] that `stiffen` takes; None where it cannot be changed
        while the arm is held."""
        ...

    def stiffen(self, stiffness: Floats) -> None:
        """Hold the arm with `stiffness` [m] from the next `write` on. DriverError where that is out
        of range, or cannot be changed."""
        ...


def springs_of(driver: ArmDriver) -> Springs | None:
    """The driver's springs; None where it has none."""
    return driver.springs if isinstance(driver, HasSprings) else None


def stiffen(driver: ArmDriver, stiffness: Floats) -> None:
    """Let the driver hold its arm with `stiffness` [m]. DriverError."""
    if not isinstance(driver, HasSprings):
        raise DriverError(f"{type(driver).__name__} cannot change its stiffness")
    driver.stiffen(stiffness)
