"""Braking after an error in the control loop itself."""

from __future__ import annotations

import contextlib
import sys
import traceback

import numpy as np

from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import ArmDriver, DriverError, droop_of
from embodied.real_robot.kernel.hand import REST_FORCE, HandLimiter
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.messages import TEXT


class LastResort:
    """Braking after an error in the control loop itself, by as little code as possible.

    A part of the loop raised: a controller with a mistake, a driver that returned the wrong shape,
    a motion planner that failed. None of them is run again before an operator resets. The commanded
    motion goes to where the arm was measured last, within its limits, so that the arm does not
    press on (stop category 2). Call `mark` at the beginning of every tick (0.5 us), `begin` after
    an error, then `brake` once a tick."""

    def __init__(
        self, driver: ArmDriver, limiter: Limiter, hand: HandLimiter | None = None
    ) -> None:
        self.driver = driver
        self.limiter = limiter
        self.hand = hand
        self.stopped = False
        """Whether braking failed as well and the driver was told to stop; it is sent nothing."""
        self._sent = limiter.q.copy()
        self._aim: Floats | None = None

    def mark(self) -> None:
        """Remember the set-point that was sent last, to know whether this tick has already moved
        it."""
        np.copyto(self._sent, self.limiter.q)

    @property
    def resting(self) -> bool:
        return self.stopped or self.limiter.resting

    def begin(self, error: Exception, arm: ArmState | None, released: bool) -> str:
        """Begin to brake after `error`; returns the fault to latch, which is logged as well.

        `arm` is the newest measurement. An arm that was `released` is held again. Never raises."""
        self.stopped = False
        self._aim = self._measured(arm)
        try:
            if released:
                self.driver.engage()
        except Exception as another:
            self._give_up(another)
        return logged(describe(error))

    def brake(self, width: float) -> None:
        """Send one tick of braking; where that fails as well, let the robot's own controller stop
        it. Never raises."""
        if self.stopped:
            return
        try:
            # Two steps in one tick would be twice the speed.
            moved = bool((self.limiter.q != self._sent).any())
            q = self.limiter.q if moved else self._step()
            self.driver.hold(q, width if self.hand is None else self._width(self.hand))
            if self.hand is not None:
                self.hand.tell(self.driver)
        except Exception as error:
            self._give_up(error)

    def _width(self, hand: HandLimiter) -> float:
        """The opening (m) of a hand that does what it does at a latched stop. Nothing is measured:
        what it holds may be gone, and it presses no harder than with nothing."""
        with contextlib.suppress(Exception):
            hand.stay(self.driver.width, latched=True)
        hand.force = min(hand.force, REST_FORCE)
        return hand.width

    def _give_up(self, error: Exception) -> None:
        """Let the robot's own controller stop it, and send nothing more."""
        self.stopped = True
        logged(f"braking failed as well: {describe(error)}")
        with contextlib.suppress(Exception):
            self.driver.halt()

    def _measured(self, arm: ArmState | None) -> Floats | None:
        """The set-point [n] that holds the arm where it was measured; None where that is not
        known, and the arm is only braked."""
        try:
            assert arm is not None
            aim = np.add(arm.q, droop_of(self.driver)(arm.q))
            return aim if aim.shape == self.limiter.q.shape and np.isfinite(aim).all() else None
        except Exception:
            return None

    def _step(self) -> Floats:
        """The next set-point [n] on the way to rest."""
        try:
            return self.limiter.brake() if self._aim is None else self.limiter.unguarded(self._aim)
        except Exception:
            self._aim = None
            return self.limiter.brake()


def describe(error: Exception) -> str:
    """One line about `error`: its type, its message and the line that raised it."""
    if isinstance(error, DriverError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    said = " ".join(str(error).split())[: TEXT - 100]
    return f"internal error in the control loop: {type(error).__name__}: {said}{place}"


def logged(line: str) -> str:
    """Print `line` to the log, and return it."""
    with contextlib.suppress(OSError):  # a full disk
        print(line, file=sys.stderr, flush=True)
    return line
