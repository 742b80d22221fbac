"""ALP-GMM: absolute learning progress with Gaussian mixtures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.core.bounds import CountOrZero
from embodied.core.spec import Spec
from embodied.teachers.tasks.gmm import Fitted, GmmConfig, Mixture
from embodied.teachers.teacher import Floats

FEW = 5  # up to this many earlier tasks, the progress is 0


@dataclass(frozen=True, kw_only=True)
class AlpGmmConfig(GmmConfig):
    """Settings of ALP-GMM. With `memory` 0 (as published) old scores count as much as new ones, and
    the search time grows."""

    memory: CountOrZero = 20_000  # newest tasks among which the nearest is searched; 0: all


class AlpGmm(Fitted):
    """ALP-GMM: tasks with a high absolute learning progress; needs only the scores of episodes.

    Portelas, Colas, Hofmann and Oudeyer, "Teacher algorithms for curriculum learning of Deep RL in
    continuously parameterized environments", 2019. The absolute learning progress of a task p with
    score r is alp = |r - r'|, r' the score of the nearest earlier task. A Gaussian mixture is
    fitted to the vectors (p, alp); components are sampled in proportion to their mean alp.
    """

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
