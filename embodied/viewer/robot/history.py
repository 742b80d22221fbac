"""Past: how a deployment went in the last minutes, in curves, from what its control process says.

What is counted (ticks, missed ticks, interventions) becomes a rate between two samples; of what
comes and goes (lateness) the worst in between is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from real_robot.control.arm_state import Floats

EVERY = 0.5  # s between two samples
KEPT = 240  # samples
TRAIL, MOVED = 400, 2e-3  # places of the tool; m between two
PLOTS = ("rate (Hz)", "late (ms)", "missed ticks", "policy's last word (s ago)", "off target (rad)")


class Past:
    """`add` every message of the control process; `curves` are what can be drawn.

    `off target` is the largest distance of a joint from where it was sent.
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self.stages = tuple(stages)
        self.rows: deque[tuple[float, ...]] = deque(maxlen=KEPT)
        self.tool: deque[Floats] = deque(maxlen=TRAIL)
        self._first: np.void | None = None
        self._last: np.void | None = None
        self._late = 0.0

    def add(self, state: np.void, chunk: np.void | None, tool: Floats | None) -> None:
        """Take note of `state`, the newest `chunk` and where the tool is [3] (m), if
        that is known."""
        self._late = max(self._late, float(state["late"]))
        if tool is not None and (not self.tool or np.abs(self.tool[-1] - tool).max() > MOVED):
            self.tool.append(tool)
        if self._last is None:
            self._first = self._last = state
        passed = float(state["now"]) - float(self._last["now"])
        if passed >= EVERY:
            self.rows.append(self._sample(state, chunk, self._last, passed))
            self._last, self._late = state, 0.0

    def times(self) -> Floats:
        """s since this was first looked at, of each sample [T]."""
        return np.array([row[0] for row in self.rows] or [0.0])

    def curve(self, name: str) -> Floats:
        """The values [T] of one of PLOTS."""
        return self._column(1 + PLOTS.index(name))

    def acted(self, stage: str) -> Floats:
        """Share of ticks (%) in which a safety stage changed what was asked for [T]."""
        return self._column(1 + len(PLOTS) + self.stages.index(stage))

    def trail(self) -> Floats | None:
        """Where the tool was [K, 3] (m); None before it moved."""
        return np.stack(self.tool) if len(self.tool) > 1 else None

    def _column(self, at: int) -> Floats:
        return np.array([row[at] for row in self.rows] or [np.nan])

    def _sample(
        self, state: np.void, chunk: np.void | None, last: np.void, passed: float
    ) -> tuple[float, ...]:
        assert self._first is not None
        now, ticks = float(state["now"]), int(state["tick"]) - int(last["tick"])
        heard = np.nan if chunk is None else now - float(chunk["seen"])
        off = float(np.abs(state["sent"] - state["q"]).max())
        acted = 100.0 * (state["counts"] - last["counts"]) / max(ticks, 1)
        return (
            now - float(self._first["now"]),
            ticks / passed,
            1e3 * self._late,
            float(state["missed"] - last["missed"]),
            heard,
            off,
            *map(float, acted),
        )
