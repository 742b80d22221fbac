"""Learning curves of a study's variants: a metric over steps and over time, of every seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.evaluation.statistics import bootstrap_interval, iqm
from embodied.study.study import Study, is_done
from embodied.training.logger import read_metrics


@dataclass(frozen=True)
class Curve:
    """One variant: `steps` [P], `seconds` [P] (median over seeds), `scores` [S, P]."""

    steps: NDArray[np.float64]
    seconds: NDArray[np.float64]
    scores: NDArray[np.float64]

    @property
    def middle(self) -> NDArray[np.float64]:
        """[P], the interquartile mean over seeds"""
        return np.array([iqm(column) for column in self.scores.T])

    @property
    def band(self) -> NDArray[np.float64]:
        """[P, 2]"""
        return np.array([bootstrap_interval(column) for column in self.scores.T])


def read(study: Study, work: Path, variant: str) -> Curve | None:
    """The evaluations of every seed of a variant; None if a seed is missing, or has no times."""
    if not all(is_done(work, variant, seed) for seed in study.seeds):
        return None
    runs = [work / f"{variant}-{seed}" for seed in study.seeds]
    rows = [
        [row for row in read_metrics(run) if study.metric in row and "seconds" in row]
        for run in runs
    ]
    count = min(map(len, rows))
    if not count:
        return None
    return Curve(
        np.array([row["step"] for row in rows[0][:count]], dtype=np.float64),
        np.median([[row["seconds"] for row in own[:count]] for own in rows], 0),
        np.array([[row[study.metric] for row in own[:count]] for own in rows]),
    )
