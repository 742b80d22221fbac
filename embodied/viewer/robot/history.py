"""RobotHistory: the last two minutes of a deployment as curves.

Counters (ticks, missed ticks, interventions) become rates between two samples; of the lateness the
maximum in between is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from embodied.real_robot.control.arm_state import Floats

EVERY = 0.5  # s between two samples
KEPT = 240  # samples
TRAIL, MOVED = 400, 2e-3  # places of the tool; m between two
PLOTS = ("rate (Hz)", "late (ms)", "missed ticks", "observation age (s)", "off target (rad)")


class RobotHistory:
    """`add` every state message; `curve`, `intervention_share` and `trail` are what is plotted.

    `off target` is the largest joint distance between the sent target and the measurement.
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self.stages = tuple(stages)
        self.rows: deque[tuple[float, ...]] = deque(maxlen=KEPT)
        self.tool: deque[Floats] = deque(maxlen=TRAIL)
        self._first: np.void | None = None
        self._last: np.void | None = None
        self._late = 0.0

    def add(self, state: np.void, chunk: np.void | None, tool: Floats | None) -> None:
        """Record `state`, the newest `chunk` and the tool position [3] (m), if known."""
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
        """Time of each sample [T], s since the first state."""
        return np.array([row[0] for row in self.rows] or [0.0])

    def curve(self, name: str) -> Floats:
        """The values [T] of one of PLOTS."""
        return self._column(1 + PLOTS.index(name))

    def intervention_share(self, stage: str) -> Floats:
        """Share of ticks (%) in which a safety stage changed the target [T]."""
        return self._column(1 + len(PLOTS) + self.stages.index(stage))

    def trail(self) -> Floats | None:
        """The tool's path [K, 3] (m); None before it moved."""
        return np.stack(self.tool) if len(self.tool) > 1 else None

    def _column(self, at: int) -> Floats:
        return np.array([row[at] for row in self.rows] or [np.nan])

    def _sample(
        self, state: np.void, chunk: np.void | None, last: np.void, passed: float
    ) -> tuple[float, ...]:
        assert self._first is not None
        now, ticks = float(state["now"]), int(state["tick"]) - int(last["tick"])
        age = np.nan if chunk is None else now - float(chunk["seen"])
        off = float(np.abs(state["sent"] - state["q"]).max())
        acted = 100.0 * (state["counts"] - last["counts"]) / max(ticks, 1)
        return (
            now - float(self._first["now"]),
            ticks / passed,
            1e3 * self._late,
            float(state["missed"] - last["missed"]),
            age,
            off,
            *map(float, acted),
        )
