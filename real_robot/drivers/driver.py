"""Driver: the interface that reads a robot's joints and sends it joint targets.

A driver knows nothing of policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Annotated, ClassVar, Self

import numpy as np

from embodied.core.bounds import Bound
from embodied.real_robot.control.arm_state import ArmState, Floats, Limits
from embodied.real_robot.drivers.springs import Springs

Wait = Annotated[float, Bound(above=0.0, high=3600.0)]
"""A time limit, s."""


class DriverError(RuntimeError):
    """The wire or the robot failed: one line that says which and what to look at. `measured`: what
    was measured in spite of it."""

    def __init__(self, text: str, measured: ArmState | None = None) -> None:
        super().__init__(text)
        self.measured = measured


def check_stiffness(stiffness: Floats, span: tuple[Floats, Floats] | None, name: str) -> None:
    """DriverError where driver `name` cannot hold an arm with `stiffness` [m]."""
    if span is None:
        raise DriverError(f"{name} cannot change its stiffness")
    low, high = span
    if np.shape(stiffness) != low.shape or not ((stiffness >= low) & (stiffness <= high)).all():
        raise DriverError(
            f"{name} was asked for a stiffness of {np.round(stiffness, 2).tolist()}; it takes "
            f"{low.tolist()} to {high.tolist()}"
        )


class Driver(ABC):
    """Owned by one process. Leaving the context stops the arm and lets go of the wire."""

    joints: tuple[str, ...]
    """Names, in the order of all arrays [n]."""
    rest: ClassVar[str] = "hold"
    """What `stop` does: "hold" the pose against gravity, or "land". An arm is never dropped."""
    falls_when_released: ClassVar[bool] = False
    """Whether gravity takes the arm down when it is released: a person has to support it."""
    sensed: tuple[str, ...] = ()
    """Names of what `sense` knows beyond the joints: places of objects, `success`, forces."""

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
        """It is not moved: be at `q` [n]. False where it does something safer by itself (a drone
        lands): what is sent then follows what is measured. DriverError."""
        self.write(q, width)
        return True

    def cut(self) -> None:
        """An operator pressed the emergency stop: the limits bring an arm to rest, and it is held;
        what has nothing to fall from but the air switches off. Never raises."""
        return

    def release(self) -> None:
        """Make the arm compliant, so that a person can move it by hand, until `engage`: it carries
        its own weight, or falls (`falls_when_released`). Nothing is written meanwhile. DriverError
        where it cannot be released."""
        raise DriverError(
            f"{type(self).__name__} has no mode in which a person can move it by hand"
        )

    def engage(self) -> None:
        """After `release`: hold the arm again, where it is measured. DriverError."""
        return

    def droop(self, q: Floats) -> Floats:
        """How far below its target gravity holds each joint at `q` [n], rad: an arm that was sent
        to `q + droop(q)` is measured at `q`. Zeros where gravity is compensated."""
        return np.zeros(len(q))

    @property
    def springs(self) -> Springs | None:
        """What holds the arm as it was set up; None where it is held stiffly, or not known."""
        return None

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        """The lowest and the highest stiffness [m] that `stiffen` takes: N m/rad of each joint,
        or of springs on the tool N/m (x, y, z) and N m/rad (the turn about them); None where it
        cannot be changed while the arm is held."""
        return None

    def stiffen(self, stiffness: Floats) -> None:
        """The stiffness [m] of the springs from the next `write` on, in the range of `stiffness`.
        DriverError where it is out of range, or cannot be changed."""
        check_stiffness(stiffness, None, type(self).__name__)

    def unloaded(self, stretch: Floats) -> None:
        """The arm rests and touches nothing: `stretch` [n] is how far below its target gravity
        holds it there, rad. For a driver that knows no better `droop`."""
        return

    @property
    @abstractmethod
    def width(self) -> float:
        """How far the hand was measured to be open, m (0 without a hand)."""

    def reach(self) -> tuple[Floats, Floats] | None:
        """Joint positions [n], low and high, that its calibration knows to be reachable; None where
        it was not calibrated."""
        return None

    def sense(self) -> Floats:
        """The numbers named in `sensed`, at the time of the last `read`."""
        return np.zeros(0)

    def renew(self) -> None:
        """An episode is over: a simulated world lays its things out again; people do elsewhere."""
        return

    def check(self, limits: Limits) -> None:
        """Once connected: DriverError where `limits` ask for more than the arm itself allows."""
        return

    def recover(self) -> None:
        """An operator has reset: clear what the robot itself latched, connect again if there is
        need. It may take seconds; nothing of ours moves the arm then. DriverError."""
        return

    @abstractmethod
    def stop(self) -> None:
        """Stay where the arm is, from any state; safe to call twice. Never raises for a wire that
        is gone: the robot's own watchdog has to act then."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the wire; safe to call twice."""

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.close()
