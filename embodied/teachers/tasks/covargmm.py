"""Covar-GMM: samples tasks whose scores rise over time, by the covariance of score and time.

Moulin-Frier, Nguyen and Oudeyer, "Self-organization of early vocal development in infants and
machines", 2014. A Gaussian mixture is fitted to the vectors (p, t, r) of a window of episodes (task
p, time t from 0 to 1 in the window, score r). Components are sampled in proportion to
max(0, cov(t, r)), or |cov(t, r)|.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.core.spec import Spec
from embodied.teachers.tasks.gmm import Fitted, GmmConfig, Mixture
from embodied.teachers.teacher import Floats


@dataclass(frozen=True, kw_only=True)
class CovarGmmConfig(GmmConfig):
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
