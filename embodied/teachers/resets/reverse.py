"""Reverse curriculum along demonstrations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.bounds import Count, Fraction, PositiveFraction
from embodied.core.env import VecEnv
from embodied.core.spec import Spec
from embodied.teachers.resets import reset_distribution
from embodied.teachers.resets.reset_distribution import (
    DEFAULT_RESET,
    ResetDistribution,
    Trajectories,
)
from embodied.teachers.teacher import Floats


@dataclass(frozen=True, kw_only=True)
class ReverseConfig(reset_distribution.Config):
    """Settings of the reverse curriculum. Demonstrations known to have failed are left out."""

    every: Count = 1  # steps between saved states
    usual: Fraction = 0.2  # share of episodes that start with the environment's own reset
    enough: PositiveFraction = 0.2  # mean score at which the point moves back
    batch: Count = 20  # episodes of that mean
    width: Count = 4  # saved states before the point, from which episodes start
    stride: Count = 1  # saved states by which the point moves


class Reverse(ResetDistribution):
    """Initial states move backward along demonstrations as episodes succeed.

    Salimans and Chen, "Learning Montezuma's Revenge from a single demonstration", 2018; here with
    several demonstrations. Each has a point, at first near its end; episodes start from one of the
    `width` states before it. When the mean score of the last `batch` episodes reaches `enough`, the
    point moves `stride` states back, until episodes start with the environment's own reset.

    `point` [E]: number of states of each trajectory before its point; at 0 the trajectory is
    finished.
    """

    in_order = True
    remembered = ("point", "recent")

    def __init__(self, config: ReverseConfig, spec: Spec, env: VecEnv, seed: int = 0) -> None:
        super().__init__(config, spec, env, seed)

    def select(self, paths: Trajectories) -> Trajectories:
        return paths.successful()

    def set_up(self) -> None:
        episode = self.paths.episode.numpy()
        count = len(self.paths.returns)
        self.first = np.searchsorted(episode, np.arange(count))
        self.size = np.bincount(episode, minlength=count)
        self.point = self.size.copy()
        self.recent = [deque(maxlen=self.config.batch) for _ in range(count)]

    def propose(self, n: int) -> list[tuple[int, Any]]:
        return [self._one(int(each)) for each in self.random.integers(len(self.point), size=n)]

    def _one(self, path: int) -> tuple[int, Any]:
        end = int(self.point[path])
        if end == 0:
            return DEFAULT_RESET, None
        low = max(end - self.config.width, 0)
        return int(self.first[path] + self.random.integers(low, end)), (path, end)

    def learn(self, states: list[int], scores: Floats, memos: list[Any]) -> None:
        """Ignores episodes that started before the point last moved."""
        for score, (path, end) in zip(scores, memos, strict=True):
            if end != self.point[path]:
                continue
            recent = self.recent[path]
            recent.append(float(score))
            if len(recent) == self.config.batch and np.mean(recent) >= self.config.enough:
                self.point[path] = max(end - self.config.stride, 0)
                recent.clear()

    def metrics(self) -> dict[str, float]:
        return {"done": float(1 - (self.point / self.size).mean())}
