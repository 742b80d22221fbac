"""Task density: plots where in task space a teacher sampled, for each quarter of a run.

Each quarter is one panel over two task parameters: the density of its tasks, and a contour line at
a mean score of 0.5.

Level gallery: sample levels of each quarter of a run, with frames coloured by success.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.teachers.teacher import FILE, Floats

QUARTERS = 4
CELLS = 40
BLUR = 1.3  # standard deviation, in cells
INK = "#0b6bcb"
WON = "#c2410c"
LOST = "#94a3b8"


@dataclass(frozen=True)
class LoggedEpisodes:
    """n episodes in the order in which they ended: `began` [n] (their tickets, in order of
    their start), `task` [n, D], `ret`, `success` (NaN: unknown) and `length` [n]."""

    began: Floats
    task: Floats
    ret: Floats
    success: Floats
    length: Floats


def read_episode_log(folder: Path) -> LoggedEpisodes | None:
    """The episode log of the run in `folder`; None if there is none. Broken lines are skipped."""
    file = folder / FILE
    if not file.exists():
        return None
    rows = []
    for line in file.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    if not rows:
        return None

    def column(name: str) -> Floats:
        return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=float)

    parts = (column("return"), column("success"), column("length"))
    return LoggedEpisodes(column("episode"), np.array([row["task"] for row in rows]), *parts)


def draw(
    file: Path,
    times: Floats,
    points: Floats,
    scores: Floats,
    names: tuple[str, ...],
    axes: tuple[int, int] = (0, 1),
    title: str = "",
    steps: str = "episode",
) -> Path:
    """Write a PNG of the tasks `points` [n, d] in [0, 1] of episodes with start times `times` [n]
    (in the unit `steps`) and `scores` [n] (NaN: unknown), over the parameters `axes` of `names`.

    With one task parameter the other axis is the score. ConfigError if there are no episodes.
    """
    pyplot = _pyplot(times)
    x, y = points[:, axes[0]], points[:, axes[1]] if points.shape[1] > 1 else scores
    labels = (names[axes[0]], names[axes[1]] if points.shape[1] > 1 else "score")
    figure, panels = pyplot.subplots(
        1, QUARTERS, figsize=(13, 3.7), sharex=True, sharey=True, constrained_layout=True
    )
    parts = quarters(times)
    maps = [density(x[part], y[part]) for part in parts]
    top = max(float(each.max()) for each in maps)
    for panel, part, each in zip(panels, parts, maps, strict=True):
        _panel(panel, each, top, success(x[part], y[part], scores[part]))
        panel.set_title(span(times[part], steps, scores[part]), fontsize=9)
        panel.set_xlabel(labels[0])
    panels[0].set_ylabel(labels[1])
    if title:
        figure.suptitle(title, fontsize=11)
    return _saved(pyplot, figure, file)


def _pyplot(times: Floats) -> Any:
    if not len(times):
        raise ConfigError("nothing to plot: no episode has finished yet")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _saved(pyplot: Any, figure: Any, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def quarters(times: Floats) -> list[Any]:
    """Indices of the episodes in each quarter of the time between the first and the last one."""
    low, high = float(times.min()), float(times.max())
    place = (times - low) / max(high - low, 1e-9) * QUARTERS
    number = np.minimum(place.astype(int), QUARTERS - 1)
    return [np.flatnonzero(number == quarter) for quarter in range(QUARTERS)]


def span(times: Floats, steps: str, scores: Floats) -> str:
    if not len(times):
        return "no episodes"
    known = scores[np.isfinite(scores)]
    mean = f", mean score {known.mean():.2f}" if len(known) else ""
    return f"{steps} {times.min():,.0f} to {times.max():,.0f}{mean}"


def density(x: Floats, y: Floats) -> Floats:
    """Density [CELLS, CELLS] by (y, x), relative to uniform sampling; 0 if there are none."""
    counts = _counts(x, y, None)
    total = counts.sum()
    return _blurred(counts) / total * CELLS**2 if total else counts


def success(x: Floats, y: Floats, scores: Floats) -> Floats:
    """Mean score [CELLS, CELLS] by (y, x) around each cell; NaN where there are no tasks."""
    known = np.isfinite(scores)
    x = x[known]
    y = y[known]
    scores = scores[known]
    near = _blurred(_counts(x, y, None))
    total = _blurred(_counts(x, y, scores))
    return np.where(near > 0.05, total / np.maximum(near, 1e-9), np.nan)


def _counts(x: Floats, y: Floats, weights: Floats | None) -> Floats:
    known = np.isfinite(x) & np.isfinite(y)
    weights = None if weights is None else weights[known]
    edges = np.linspace(0, 1, CELLS + 1)
    places = (np.clip(y[known], 0, 1), np.clip(x[known], 0, 1))
    return np.histogram2d(*places, bins=(edges, edges), weights=weights)[0]


def _blurred(counts: Floats) -> Floats:
    """Gaussian blur that keeps the sum: the kernel is renormalised at the edges."""
    cells = np.arange(CELLS)
    kernel = np.exp(-0.5 * ((cells[:, None] - cells[None]) / BLUR) ** 2)
    kernel /= kernel.sum(0)
    return kernel @ counts @ kernel.T


def _panel(panel: Any, dense: Floats, top: float, won: Floats) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("tasks", ["#ffffff", INK, "#08264a"])
    # The square root makes low densities visible.
    image = np.sqrt(dense / max(top, 1e-9))
    panel.imshow(image, origin="lower", extent=(0, 1, 0, 1), cmap=colours, vmin=0, vmax=1)
    known = won[np.isfinite(won)]
    if len(known) and known.min() < 0.5 <= known.max():
        middles = (np.arange(CELLS) + 0.5) / CELLS
        panel.contour(middles, middles, won, levels=[0.5], colors=WON, linewidths=1.4)
    panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    panel.tick_params(labelsize=8)


ACROSS, DOWN = 3, 3  # levels of each quarter


def draw_levels(
    file: Path,
    times: Floats,
    levels: Floats,
    scores: Floats,
    sight: Callable[[Floats], NDArray[np.uint8]],
) -> Path:
    """Write a PNG of levels [n, D] of episodes with start times `times` [n] and `scores` [n]: up to
    nine levels of each quarter, evenly spaced, as images uint8 [h, w, 3] from `sight`.

    ConfigError if there are no episodes.
    """
    pyplot = _pyplot(times)
    parts = quarters(times)
    figure = pyplot.figure(figsize=(13, 3.7), constrained_layout=True)
    blocks = np.ravel(np.asarray(figure.subfigures(1, len(parts)), object))
    for block, part in zip(blocks, parts, strict=True):
        block.suptitle(span(times[part], "episode", scores[part]), fontsize=9)
        panels = block.subplots(DOWN, ACROSS).ravel()
        for panel in panels:
            panel.set(xticks=[], yticks=[], frame_on=False)
        for panel, at in zip(panels, chosen(part), strict=False):
            won = scores[at] >= 0.5
            panel.imshow(sight(levels[at]), interpolation="nearest")
            panel.set(frame_on=True)
            for edge in panel.spines.values():
                edge.set(color=WON if won else LOST, linewidth=2.5)
    return _saved(pyplot, figure, file)


def chosen(part: NDArray[np.int64]) -> list[int]:
    """Up to nine of a quarter's episodes, evenly spaced."""
    count = min(ACROSS * DOWN, len(part))
    return [int(part[i]) for i in np.linspace(0, len(part) - 1, count).round().astype(int)]
