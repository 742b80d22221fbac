"""Covar-GMM: learning progress as the covariance of score and time."""

from __future__ import annotations

from embodied.teachers.tasks.gmm import Fitted, Mixture
from embodied.teachers.teacher import Floats


class CovarGmm(Fitted):
    """Covar-GMM: tasks whose scores rise over time. Slower than `AlpGmm` to notice forgetting, but
    less sensitive to noisy scores.

    Moulin-Frier, Nguyen and Oudeyer, "Self-organization of early vocal development in infants and
    machines", 2014. A Gaussian mixture is fitted to the vectors (p, t, r) of a window of episodes
    (task p, time t from 0 to 1 in the window, score r). Components are sampled in proportion to
    max(0, cov(t, r)).
    """

    def row(self, point: Floats, score: float) -> list[float]:
        return [*point.tolist(), len(self.rows) / self.config.every, score]

    def worth(self, mixture: Mixture) -> Floats:
        return mixture["cov"][:, -2, -1].clip(0)
