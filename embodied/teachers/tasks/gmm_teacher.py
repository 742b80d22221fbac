"""What the teachers that fit Gaussian mixtures to progress have in common.

Rows (point, ..., progress) of the last `every` episodes become a mixture; a component is drawn by
the progress in it, a task from the component.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.task_space import Floats
from embodied.teachers.tasks import gmm
from embodied.teachers.tasks.gmm import Mixture


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """A fit `every` so many episodes, of those episodes only, with `fewest` to `most` components,
    the number by `criterion`. `random` is the share of tasks that are drawn from the whole box."""

    every: int = 250
    random: float = 0.2
    fewest: int = 2
    most: int = 10
    criterion: Literal["aic", "aicc"] = "aic"


class Fitted(teacher.Teacher):
    """Until the first fit, every task as often as every other."""

    remembered = ("rows", "fits", "mixture", "utility")

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        if not (1 <= config.fewest <= config.most and config.every >= 2 * config.fewest):
            raise ConfigError(
                f"teacher: fewest={config.fewest} to most={config.most} components cannot be "
                f"fitted every={config.every} episodes; every needs two episodes a component"
            )
        self.settings = config
        self.rows: list[list[float]] = []
        self.fits = 0
        self.mixture: Mixture | None = None
        self.utility: list[float] = []

    @abstractmethod
    def row(self, point: Floats, score: float) -> list[float]:
        """What is fitted of an episode, its point first."""

    @abstractmethod
    def worth(self, mixture: Mixture) -> Floats:
        """[K]: how much each component should be drawn, at least 0."""

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        return [self.one() for _ in range(n)]

    def one(self) -> tuple[Floats, Any]:
        """A point, and the component it comes from (None: from the whole box)."""
        fitted, width = self.mixture, len(self.space)
        if fitted is None or self.random.random() < self.settings.random:
            return self.random.random(width), None
        component = pick(self.utility, self.random)
        return gmm.draw(fitted, component, width, self.random).clip(0, 1), component

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for point, score, memo in zip(points, scores.tolist(), memos, strict=True):
            self.take(point, score, memo)

    def take(self, point: Floats, score: float, memo: Any) -> None:
        """One episode."""
        self.rows.append(self.row(point, score))
        if len(self.rows) >= self.settings.every:
            self.refit()
            self.rows = []

    def refit(self) -> None:
        sizes = range(self.settings.fewest, self.settings.most + 1)
        rows = np.array(self.rows)
        found = gmm.best(rows, sizes, self.random, self.settings.criterion)
        if found is not None:
            self.mixture, self.utility = found, self.worth(found).tolist()
            self.fits += 1

    def metrics(self) -> dict[str, float]:
        components = len(self.utility)
        mean = sum(self.utility) / components if components else 0.0
        return {"fits": float(self.fits), "components": float(components), "progress": mean}


def pick(weights: list[float], random: np.random.Generator) -> int:
    """A number from 0 by its weight; each as likely where all weights are 0."""
    edge = np.cumsum(weights)
    if edge[-1] <= 0:
        return int(random.integers(len(weights)))
    return min(int(np.searchsorted(edge, random.random() * edge[-1], "right")), len(weights) - 1)
