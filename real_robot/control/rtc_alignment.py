"""Time alignment for real-time chunking (RTC): where the next chunk joins the one being executed.

    start      measured            posted
     |a0 |a1 |a2 |a3 |a4 |a5 |a6 |        the previous plan
             |a2 |a3 |b2 |b3 |b4 |b5 |    the next, on the same grid: 2 executed steps, delay 2

A policy that continues its own plan (`embodied.policies.wrappers.real_time_chunking`) has to know
how many steps of it were executed, and how many will have been when the next chunk arrives. Both
are measured by the clock, not by counting decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from embodied.core.actor import Actor


class RtcAlignment:
    """Call `align` before a decision and `chunk_posted` after its chunk; `clock` is that of the
    stamps.

    The delay is the largest of the last `KEPT` decisions, to the nearest step: each that is fixed
    for longer than it has to be makes the arm slower to see (of 20 lifts 80 ms late, 11 succeeded
    with one step more, 18 with none), and one too few is a seam with nothing but the blend.
    """

    KEPT = 20

    def __init__(self, dt: float, chunk: int, clock: Callable[[], float]) -> None:
        self.dt = dt
        self.chunk = chunk
        self.clock = clock
        self.start = 0.0
        """Time (s) at which the first action of the newest plan begins."""
        self.latencies: deque[float] = deque(maxlen=self.KEPT)

    def align(self, actor: Actor, measured: float, moves: bool) -> bool:
        """Tell the policy where it is at `measured` (s); False where it begins anew, because the
        arm does not follow what it said (it does not move, or nothing was left)."""
        followed = max(1, round((measured - self.start) / self.dt))
        if not moves or followed >= self.chunk:
            self.start = measured
            return False
        self.start += followed * self.dt
        actor.cursor = torch.tensor([followed])
        actor.carry = {**actor.carry, "delay": torch.tensor([self.delay])}
        return True

    @property
    def delay(self) -> int:
        """Steps from the beginning of a plan to the last that is done without it. A chunk counts
        from the arm's next step on, half a step later on average, and the middle of that step says
        which action it is."""
        return min(int(max(self.latencies, default=0.0) / self.dt + 1.0), self.chunk - 1)

    def chunk_posted(self) -> None:
        """Note that the newest plan was posted now."""
        self.latencies.append(self.clock() - self.start)
