"""Driver: the interface that reads a robot's joints and sends it joint targets.

A driver knows nothing of policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

import numpy as np

from real_robot.control.arm_state import ArmState, Floats, Limits


class DriverError(RuntimeError):
    """The wire or the robot failed: one line that says which and what to look at."""


class Driver(ABC):
    """Owned by one process. Leaving the context stops the arm and lets go of the wire."""

    joints: tuple[str, ...]
    """Names, in the order of all arrays [n]."""
    rest: ClassVar[str] = "hold"
    """What `stop` does: "hold" the pose against gravity, or "land". An arm is never dropped."""
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
        """Nobody moves it: be at `q` [n]. False where it does something safer by itself (a drone
        lands): what is sent then follows what is measured. DriverError."""
        self.write(q, width)
        return True

    def cut(self) -> None:
        """An operator pressed the emergency stop: the limits bring an arm to rest, and it is held;
        what has nothing to fall from but the air switches off. Never raises."""
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
