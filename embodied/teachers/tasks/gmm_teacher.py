"""Base class of teachers that fit a Gaussian mixture to learning progress (ALP-GMM, Covar-GMM).

Every `every` episodes a mixture is fitted to their vectors (point, ..., progress). A component is
sampled in proportion to its progress, and the task is sampled from the component.

Covar-GMM: samples tasks whose scores rise over time, by the covariance of score and time.

Moulin-Frier, Nguyen and Oudeyer, "Self-organization of early vocal development in infants and
machines", 2014. A Gaussian mixture is fitted to the vectors (p, t, r) of a window of episodes (task
p, time t from 0 to 1 in the window, score r). Components are sampled in proportion to
max(0, cov(t, r)), or |cov(t, r)|.

ALP-GMM: samples tasks with high absolute learning progress from a Gaussian mixture.

Portelas, Colas, Hofmann and Oudeyer, "Teacher algorithms for curriculum learning of Deep RL in
continuously parameterized environments", 2019. The absolute learning progress of a task p with
score r is alp = |r - r'|, r' the score of the nearest earlier task. A Gaussian mixture is fitted to
the vectors (p, alp); components are sampled in proportion to their mean alp.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embodied.core.bounds import Count, CountOrZero, Fraction
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.task_space import Floats
from embodied.teachers.tasks import gmm
from embodied.teachers.tasks.gmm import Mixture

FEW = 5  # up to this many earlier tasks, the progress is 0


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """Settings of the mixture. Each fit uses the newest `every` episodes only."""

    every: Count = 250  # episodes between fits
    random: Fraction = 0.2  # share of tasks that are sampled uniformly from the whole box
    fewest: Count = 2  # least number of components
    most: Count = 10  # largest number of components
    criterion: Literal["aic", "aicc"] = "aic"  # chooses the number of components


class Fitted(teacher.Teacher):
    """Subclasses define the vectors (`row`) and the weights of components (`worth`). Before the
    first fit, tasks are sampled uniformly."""

    remembered = ("rows", "fits", "mixture", "utility")

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        if config.fewest > config.most or config.every < 2 * config.fewest:
            raise ConfigError(
                f"teacher: fewest={config.fewest} to most={config.most} components cannot be "
                f"fitted to every={config.every} episodes; teacher.every should be at least "
                "two episodes a component"
            )
        self.settings = config
        self.rows: list[list[float]] = []
        self.fits = 0
        self.mixture: Mixture | None = None
        self.utility: list[float] = []

    @abstractmethod
    def row(self, point: Floats, score: float) -> list[float]:
        """The vector of an episode that the mixture is fitted to; it begins with `point` [d]."""

    @abstractmethod
    def worth(self, mixture: Mixture) -> Floats:
        """Unnormalised sampling weights [K] of the components, at least 0."""

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        return [self.one() for _ in range(n)]

    def one(self) -> tuple[Floats, Any]:
        """Sample a point [d]; also returns its component (None: the whole box)."""
        fitted, width = self.mixture, len(self.space)
        if fitted is None or self.random.random() < self.settings.random:
            return self.random.random(width), None
        component = pick(self.utility, self.random)
        return gmm.draw(fitted, component, width, self.random).clip(0, 1), component

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for point, score, memo in zip(points, scores.tolist(), memos, strict=True):
            self.take(point, score, memo)

    def take(self, point: Floats, score: float, memo: Any) -> None:
        """Add one finished episode; refit once there are `every`."""
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
    """Sample an index in proportion to `weights`; uniformly if all weights are 0."""
    edge = np.cumsum(weights)
    if edge[-1] <= 0:
        return int(random.integers(len(weights)))
    return min(int(np.searchsorted(edge, random.random() * edge[-1], "right")), len(weights) - 1)


@dataclass(frozen=True, kw_only=True)
class CovarGmmConfig(Config):
    """Settings of Covar-GMM. Progress is measured within `every` episodes: use more if there are
    many parallel envs and few updates."""

    absolute: bool = False  # falling scores count as well


class CovarGmm(Fitted):
    """Slower than `AlpGmm` to notice forgetting, but less sensitive to noisy scores."""

    def __init__(self, config: CovarGmmConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        self.absolute = config.absolute

    def row(self, point: Floats, score: float) -> list[float]:
        return [*point.tolist(), len(self.rows) / self.settings.every, score]

    def worth(self, mixture: Mixture) -> Floats:
        slope = mixture["cov"][:, -2, -1]
        return np.abs(slope) if self.absolute else slope.clip(0)


@dataclass(frozen=True, kw_only=True)
class AlpGmmConfig(Config):
    """Settings of ALP-GMM. With `memory` 0 (as published) old scores count as much as new ones, and
    the search time grows."""

    memory: CountOrZero = 20_000  # newest tasks among which the nearest is searched; 0: all


class AlpGmm(Fitted):
    """Needs only the scores of episodes: no thresholds and no access to the student."""

    remembered = ("known", "seen")

    def __init__(self, config: AlpGmmConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        self.limit = config.memory
        self.known = np.zeros((64, len(self.space) + 1))  # points and scores, a ring if limited
        self.seen = 0

    def row(self, point: Floats, score: float) -> list[float]:
        progress = self.progress(point, score)
        self.keep(point, score)
        return [*point.tolist(), progress]

    def worth(self, mixture: Mixture) -> Floats:
        return mixture["mean"][:, -1].clip(0)

    def progress(self, point: Floats, score: float) -> float:
        """|score - score of the nearest earlier point| (the newest one if several are as near)."""
        if self.seen <= FEW:
            return 0.0
        known = self.known[: self.filled]
        off = known[:, :-1] - point
        gap = np.einsum("nd,nd->n", off, off)
        ties = np.flatnonzero(gap == gap.min())
        age = self.seen - 1 - ties
        if self.limit:
            age %= self.limit
        return abs(score - float(known[ties[np.argmin(age)], -1]))

    @property
    def filled(self) -> int:
        """Number of stored points."""
        return min(self.seen, self.limit) if self.limit else self.seen

    def keep(self, point: Floats, score: float) -> None:
        at = self.seen % self.limit if self.limit else self.seen
        if at >= len(self.known):
            self.known = np.concatenate([self.known, np.zeros_like(self.known)])
        self.known[at, :-1], self.known[at, -1] = point, score
        self.seen += 1
