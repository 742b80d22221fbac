"""JointDriver: the base class for an arm of your own, of which you write two methods.

    class MyArm(JointDriver):
        def read_joints(self): ...                 joint positions (rad, m), hand opening (m)
        def send_joints(self, q, width): ...       joint targets (rad, m), hand opening (m)

Everything else of a `Driver` has a default: stamps are taken when `read_joints` returns,
velocities are differences of positions, torques are not measured (the torque limit then never
acts), and a stop sends the measured position, so that the arm stays where it is.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError

T = TypeVar("T")
SMOOTH = 0.5  # weight of the newest difference in the velocity


class JointDriver(Driver):
    """Set `joints` (names, in the order of all arrays) before `connect`, and `grip` of a hand: the
    force (N) that it presses with, or the least that a `limit_hand` of yours can set.

    An exception of `read_joints`, `send_joints` or `open` that is an OSError (a port, a socket), a
    TimeoutError or a ValueError counts as a lost wire: the arm stops and the fault names it.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    @abstractmethod
    def read_joints(self) -> tuple[Sequence[float] | Floats, float]:
        """Measured joint positions [n] (rad; m for sliding joints) and how far the hand is open (m;
        0 without a hand). It may not wait for longer than a tick of the control loop."""

    @abstractmethod
    def send_joints(self, q: Floats, width: float) -> None:
        """Send joint targets [n] (rad, m) and the hand's opening (m). Called in every tick."""

    def open(self) -> None:
        """Open the wire and check who is there; nothing moves."""
        return

    def shut(self) -> None:
        """Let go of the wire; safe to call twice."""
        return

    def connect(self) -> None:
        self._newest: ArmState | None = None
        self._width = 0.0
        self._guarded(self.open)
        self.read()

    def read(self) -> ArmState:
        positions, width = self._guarded(self.read_joints)
        now, q = self.clock(), np.array(positions, float)
        if q.shape != (len(self.joints),):
            raise DriverError(
                f"{type(self).__name__}: read_joints gave {q.size} positions for "
                f"{len(self.joints)} joints"
            )
        before, still = self._newest, np.zeros(len(q))
        if before is None or now <= before.t:
            dq = still if before is None else before.dq
        else:
            dq = SMOOTH * (q - before.q) / (now - before.t) + (1 - SMOOTH) * before.dq
        self._newest = ArmState(q, dq, still, now)
        self._width = float(width)
        return self._newest

    def write(self, q: Floats, width: float) -> None:
        self._guarded(lambda: self.send_joints(q, width))

    @property
    def width(self) -> float:
        return self._width

    def recover(self) -> None:
        self._guarded(self.shut)
        self.connect()

    def stop(self) -> None:
        newest: ArmState | None = getattr(self, "_newest", None)
        with contextlib.suppress(DriverError):
            if newest is not None:
                self.write(newest.q, self._width)

    def close(self) -> None:
        with contextlib.suppress(DriverError):
            self._guarded(self.shut)

    def _guarded(self, do: Callable[[], T]) -> T:
        try:
            return do()
        except DriverError:
            raise
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DriverError(f"{type(self).__name__}: {reason}") from error
