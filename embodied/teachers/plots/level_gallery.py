"""Level gallery: sample levels of each quarter of a run, with frames coloured by success."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.teachers.plots.task_density import LOST, WON, quarters, span
from embodied.teachers.task_space import Floats

ACROSS, DOWN = 3, 3  # levels of each quarter


def draw(
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
    if not len(times):
        raise ConfigError("nothing to plot: no episode has finished yet")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def chosen(part: NDArray[np.int64]) -> list[int]:
    """Up to nine of a quarter's episodes, evenly spaced."""
    count = min(ACROSS * DOWN, len(part))
    return [int(part[i]) for i in np.linspace(0, len(part) - 1, count).round().astype(int)]
