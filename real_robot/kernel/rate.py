"""A loop with absolute deadlines, t_k = t_0 + k T on the monotonic clock.

Sleeping T after each turn would drift by the time that a turn takes. A missed deadline is counted
and skipped to the next multiple; it is never made up for by a burst.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

SPIN = 3e-4  # s before a deadline at which sleeping ends and waiting begins, at most
SHARE = 0.1  # share of the period for that, at most


@contextmanager
def ahead_of_others(priority: int = 50) -> Generator[bool, None, None]:
    """Real-time priority for this process (SCHED_FIFO), not for those that it starts, and whether
    that was granted: without it, what else runs on a machine decides how punctual a loop is."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except (AttributeError, OSError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class Rate:
    """`ticks` deadlines were met, however late within their period; `missed` were skipped.

    Nothing is allocated while it runs. `spin` burns the last tenth of each period, at most 0.3 ms:
    a processor that sleeps takes as long to wake up.
    """

    def __init__(
        self, hertz: float, spin: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not hertz > 0:
            raise ValueError(f"rate of {hertz} Hz should be above 0")
        self.period = 1 / hertz
        self.clock = clock
        self.spin = min(SPIN, SHARE * self.period) if spin else 0.0
        self.begin()

    def begin(self) -> None:
        """Begin: the first deadline is one period from now."""
        self.start = self.clock()
        self.deadline = self.start
        self.index = 0
        self.ticks = self.missed = 0
        self.late = self.worst = 0.0

    def wait(self) -> float:
        """Wait until the next deadline, and return it (s). `late` is the time (s) after it."""
        self.index += 1
        now = self.clock()
        behind = int((now - self.start) / self.period) - self.index
        if behind > 0:  # whole periods have gone by
            self.missed += behind
            self.index += behind
        self.deadline = self.start + self.index * self.period
        # Sleep and spin from `now` (s) to the deadline
        # A clock that went back (a machine that was put to sleep and moved) is not waited for.
        left = min(self.deadline - now, self.period) - self.spin
        if left > 0:
            time.sleep(left)
        while self.spin and 0 < self.deadline - self.clock() < self.period:
            pass
        self.late = max(0.0, self.clock() - self.deadline)
        self.worst = max(self.worst, self.late)
        self.ticks += 1
        return self.deadline
