"""Two plots of the running episode: its rewards, and the actions that were sent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from viser import ViserServer, uplot

from embodied.core.spec import Spec
from embodied.viewer.session import Episode

CURVES = 8
"""Action elements in the plot: more cannot be told apart."""
POINTS = 400
COLOURS = (
    "#2563eb", "#dc2626", "#16a34a", "#d97706", "#9333ea", "#0891b2", "#db2777", "#65a30d",
)  # fmt: skip


class Plots:
    """Reward and actions over the seconds of the episode; `draw` sends both anew."""

    def __init__(self, server: ViserServer, spec: Spec) -> None:
        act, self.dt = spec.act, spec.dt
        self.curves, self.range = min(act.size, CURVES), (-0.05, 1.05)
        names = act.names[: self.curves] or tuple(f"action {i}" for i in range(self.curves))
        top = float(act.high) if isinstance(act.high, int | float) else 1.0
        bounds = (-0.5, top + 0.5) if act.dtype == "int64" else (-1.05, 1.05)
        shown = "actions" if act.size <= CURVES else f"first {CURVES} of {act.size} actions"
        empty = np.zeros(1)
        self.rewards = server.gui.add_uplot(
            (empty, empty),
            (_time_axis(), _curve("reward", 0)),
            title="reward",
            **_plot(130, *self.range),
        )
        self.actions = server.gui.add_uplot(
            (empty,) * (self.curves + 1),
            (_time_axis(), *(_curve(name, i) for i, name in enumerate(names))),
            title=shown,
            **_plot(160, *bounds),
        )

    def draw(self, episode: Episode) -> None:
        """Send the curves of `episode`."""
        rows = thinned(episode.steps)
        t: NDArray[np.float64] = np.zeros(1)
        rewards: NDArray[np.float64] = np.zeros(1)
        actions: NDArray[np.float64] = np.zeros((1, self.curves))
        if episode.steps:
            t = np.asarray((rows + 1) * self.dt, np.float64)
            rewards = np.array(episode.rewards, np.float64)
            shown = [episode.actions[row][: self.curves] for row in rows]
            actions = np.array(shown, np.float64)
            wanted = reward_range(rewards)
            if wanted != self.range:
                self.range, self.rewards.scales = wanted, _scales(*wanted)
            rewards = rewards[rows]
        self.rewards.data, self.actions.data = (t, rewards), (t, *actions.T.copy())


def reward_range(rewards: NDArray[np.float64]) -> tuple[float, float]:
    """Ends of the reward axis: zero and all rewards are in it, in powers of two, so that it rarely
    changes."""
    low, high = min(float(rewards.min()), 0.0), max(float(rewards.max()), 0.0)
    if low == high:
        return -0.05, 1.05
    size = float(2.0 ** np.ceil(np.log2(high - low)))
    return (-1.05 if low < 0 else -0.05) * size, (1.05 if high > 0 else 0.05) * size


def thinned(count: int) -> NDArray[np.intp]:
    """At most POINTS indices of `count`, spread evenly, the first and the last among them."""
    if count <= POINTS:
        return np.arange(count)
    return np.round(np.linspace(0, count - 1, POINTS)).astype(np.intp)


def _time_axis() -> uplot.Series:
    return uplot.Series(label="s")


def _curve(name: str, index: int) -> uplot.Series:
    return uplot.Series(
        label=name,
        stroke=COLOURS[index % len(COLOURS)],
        width=1.5,
        points=uplot.Series_Points(show=False),
    )


def _scales(low: float, high: float) -> dict[str, uplot.Scale]:
    return {"x": uplot.Scale(time=False), "y": uplot.Scale(auto=False, range=(low, high))}


def _plot(height: int, low: float, high: float) -> dict[str, Any]:
    return {
        "height": height,
        "scales": _scales(low, high),
        "legend": uplot.Legend(show=True),
        "padding": (10, 24, 0, 0),
    }
