"""Metrics over training and sampled tasks of a run, for the plots beside its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from embodied.datasets.lerobot.video import decode_image
from embodied.evaluation.statistics import wilson
from embodied.teachers.teacher import read_episode_log
from embodied.training.logger import read_metrics
from embodied.viewer.scene.images import Picture

MEASURES = ("eval/success", "eval/return", "train/success", "train/return")


@dataclass(frozen=True)
class History:
    """A metric over training: `values` [K] after `steps` [K], with 95% intervals `low` and `high`
    [K] (equal to the values where there is no interval)."""

    measure: str
    steps: Sequence[int]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def at(self, step: int) -> float:
        """The value at training step `step`, interpolated between measurements."""
        return float(np.interp(step, self.steps, self.values))


def history_of(folder: Path) -> History | None:
    """The history in a run folder's metrics.jsonl: evaluated success, else the next best metric;
    None if nothing was logged."""
    rows = read_metrics(folder)
    for name in MEASURES:
        found = [row for row in rows if name in row and np.isfinite(row[name])]
        if found:
            steps = [int(row["step"]) for row in found]
            values = [float(row[name]) for row in found]
            bands = [
                _band(name, value, row.get("eval/episodes"))
                for value, row in zip(values, found, strict=True)
            ]
            return History(
                name, steps, values, [low for low, _ in bands], [high for _, high in bands]
            )
    return None


def density_of(folder: Path, names: Sequence[str]) -> Picture | None:
    """Where in task space the run's teacher sampled, per quarter of training, as an image [height,
    width, 3]. None if the run had no teacher or matplotlib is not installed. `names` are those of
    the task's elements."""
    past = read_episode_log(folder)
    if past is None:
        return None
    try:
        from embodied.teachers.plots.task_density import draw
    except ModuleNotFoundError:
        return None
    moving = [i for i in range(past.task.shape[1]) if np.ptp(past.task[:, i]) > 1e-6] or [0]
    shown = tuple(names[i] if i < len(names) else f"task {i}" for i in moving)
    score = past.success if np.isfinite(past.success).any() else past.ret
    with TemporaryDirectory() as there:
        file = draw(Path(there) / "tasks.png", past.began, past.task[:, moving], score, shown)
        return decode_image(file.read_bytes()).numpy()[..., :3]


def _band(name: str, value: float, episodes: float | None) -> tuple[float, float]:
    if name != "eval/success" or not episodes:
        return value, value
    return wilson(round(value * episodes), int(episodes))
