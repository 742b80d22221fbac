"""Plan paths in the scene, and the curve of evaluations with a run's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from viser import ViserServer, uplot

from embodied.viewer.panels.main_view import ROOTS
from embodied.viewer.panels.plots import COLOURS
from embodied.viewer.run_folder import Run
from embodied.viewer.scene.types import Array
from embodied.viewer.session.episode import History, history_of
from embodied.viewer.session.player import label
from embodied.viewer.session.session import Session

CHOSEN, DRAWN, GONE = (213, 94, 0), (230, 159, 0), (0, 114, 178)


class Paths:
    """Line segments in the scene, by name."""

    def __init__(self, server: ViserServer) -> None:
        self.server = server
        self.shown: list[str] = []

    def show(self, lines: Mapping[str, tuple[Array, Any, float]]) -> None:
        """Draw `lines` (segments [N, 2, 3], colour, width in pixels) and remove all others."""
        for name in set(self.shown) - set(lines):
            self.server.scene.remove_by_name(name)
        for name, (points, colour, width) in lines.items():
            self.server.scene.add_line_segments(
                name, points, colour, thickness=width, thickness_units="screen"
            )
        self.shown = list(lines)


class Plans:
    """Paths of the tool: past, under the executed action chunk, and under chunks for other noise
    samples."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session, self.on = session, True
        self.paths = Paths(server)
        self._last: tuple[Any, ...] = ()

    @property
    def available(self) -> bool:
        """Whether this environment has a tool position and a scene to draw paths in."""
        plan_preview = self.session.plan_preview
        known = plan_preview is not None and plan_preview.tip is not None
        return known and self.session.recorder.scene is not None

    def draw(self) -> None:
        """Send the paths at the displayed step."""
        now = (self.on, *(id(each.now) for each in self.session.sessions), self.session.length)
        if now == self._last or not self.available:
            return
        self._last = now
        lines: dict[str, tuple[Array, Any, float]] = {}
        for each, root in zip(self.session.sessions, ROOTS, strict=False):
            if not self.on:
                continue
            ahead = each.plan_paths()
            if ahead:
                lines[f"{root}/plan"] = segments(ahead[:1]), CHOSEN, 5.0
            if len(ahead) > 1:
                lines[f"{root}/draws"] = segments(ahead[1:]), DRAWN, 2.0
            trail = each.trail()
            if trail is not None and each.at > 0:
                lines[f"{root}/trail"] = segments([trail[: each.at + 1]]), GONE, 2.5
        self.paths.show(lines)


def segments(paths: list[Array]) -> Array:
    """Line segments [N, 2, 3] of all paths."""
    pairs = [np.stack([path[:-1], path[1:]], 1) for path in paths]
    return np.concatenate(pairs).astype(np.float32)


class Checkpoints:
    """The run's evaluations over training, its checkpoints on the curve, the current one marked."""

    def __init__(self, server: ViserServer, run: Run, pick: Callable[[str], None]) -> None:
        self.run, self.pick = run, pick
        self.names = [label(folder) for folder in run.checkpoints]
        self.steps = [
            int(folder.name) if folder.name.isdecimal() else 0 for folder in run.checkpoints
        ]
        self.history = history_of(run.folder)
        self.plot: Any = None
        if self.history is not None:
            self.plot = self._made(server, self.history)

    def show(self, chosen: str) -> None:
        """Mark the checkpoint that acts."""
        if self.plot is None or self.history is None:
            return
        data = self._data(self.history, chosen)
        if any(
            not np.array_equal(a, b, equal_nan=True)
            for a, b in zip(data, self.plot.data, strict=True)
        ):
            self.plot.data = data

    def words(self, chosen: str) -> str:
        """The metric at the chosen checkpoint, as text."""
        if self.history is None or chosen not in self.names:
            return ""
        step = self.steps[self.names.index(chosen)]
        value = self.history.at(step)
        shown = f"{value:.0%}" if self.history.measure.endswith("success") else f"{value:.3g}"
        return f"{self.history.measure.replace('/', ' ')} at {step:,}: **{shown}**"

    def move(self, chosen: str, by: int) -> None:
        """Switch by `by` checkpoints."""
        at = self.names.index(chosen) if chosen in self.names else len(self.names)
        self.pick(self.names[min(max(at + by, 0), len(self.names) - 1)])

    def _data(self, history: History, chosen: str) -> tuple[Array, ...]:
        """Steps, the curve, its interval, and the marks, NaN elsewhere."""
        steps = np.array(sorted({*history.steps, *self.steps}), np.float64)
        curves = [
            np.interp(steps, history.steps, part)
            for part in (history.values, history.low, history.high)
        ]
        marks = np.where(np.isin(steps, self.steps), curves[0], np.nan)
        mine = self.steps[self.names.index(chosen)] if chosen in self.names else -1
        return steps, *curves, marks, np.where(steps == mine, curves[0], np.nan)

    def _made(self, server: ViserServer, history: History) -> Any:
        title = history.measure.replace("/", " ")
        line = uplot.Series(label=title, stroke=COLOURS[0], width=1.5, points=_points(False))
        edge = [
            uplot.Series(label=f"95% {end}", stroke="#9ab6de", width=1.0, points=_points(False))
            for end in ("low", "high")
        ]
        marks = uplot.Series(
            label="checkpoints", stroke=COLOURS[0], width=0, points=_points(True, 5)
        )
        mine = uplot.Series(label="current", stroke="#b85c00", width=0, points=_points(True, 11))
        ends = (-0.03, 1.03) if history.measure.endswith("success") else None
        y = uplot.Scale(auto=True) if ends is None else uplot.Scale(auto=False, range=ends)
        return server.gui.add_uplot(
            self._data(history, ""),
            (uplot.Series(label="step"), line, *edge, marks, mine),
            title=f"{title} over training",
            height=150,
            scales={"x": uplot.Scale(time=False), "y": y},
            legend=uplot.Legend(show=False),
            padding=(10, 24, 0, 0),
        )


def _points(show: bool, size: float = 0) -> uplot.Series_Points:
    return uplot.Series_Points(show=show, size=size) if size else uplot.Series_Points(show=show)
