"""SnapshotRL (S3RL): initial states from a trained policy's best episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.bounds import Count, CountOrZero
from embodied.core.env import VecEnv
from embodied.core.spec import Spec
from embodied.teachers.resets import reset_distribution
from embodied.teachers.resets.reset_distribution import (
    ResetDistribution,
    Trajectories,
)
from embodied.teachers.tasks.gmm import cluster
from embodied.teachers.teacher import Floats

PASSES = 50


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig(reset_distribution.Config):
    """Settings of SnapshotRL."""

    best: Count = 10  # recorded episodes that are kept
    clusters: Count = 6  # clusters of their states, sampled uniformly
    steps: CountOrZero = 100_000  # environment steps with saved states; 0: always
    limit: CountOrZero = 100  # steps of episodes from a saved state; 0: the environment's limit


class Snapshot(ResetDistribution):
    """SnapshotRL (S3RL; Zhao et al., 2024): initial states from a trained policy's best episodes.

    The `best` of `episodes` recorded episodes are kept, and their states are grouped into
    `clusters` by k-means. For the first `steps` steps of training an episode starts from a
    uniformly sampled state of a uniformly sampled cluster and is truncated after `limit` steps. The
    paper clusters by the player's Q(s, pi(s)); here the feature is the discounted return that
    followed, a Monte Carlo estimate of it.
    """

    remembered = ("members",)

    def __init__(self, config: SnapshotConfig, spec: Spec, env: VecEnv, seed: int = 0) -> None:
        super().__init__(config, spec, env, seed)

    def select(self, paths: Trajectories) -> Trajectories:
        best = paths.returns.argsort(descending=True)[: self.config.best]
        return paths.only(best.sort().values)

    def set_up(self) -> None:
        followed = self.paths.togo.double().numpy()[:, None]
        label = cluster(followed, [self.config.clusters], self.random, PASSES)[0].argmax(0)
        self.members = [np.flatnonzero(label == each) for each in np.unique(label)]

    def propose(self, n: int) -> list[tuple[int, Any]]:
        chosen = self.random.integers(len(self.members), size=n)
        return [(int(self.random.choice(self.members[each])), None) for each in chosen]

    def learn(self, states: list[int], scores: Floats, memos: list[Any]) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {"states": float(len(self.paths)), "clusters": float(len(self.members))}
