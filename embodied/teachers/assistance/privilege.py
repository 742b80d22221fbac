"""Privileged-action curriculum: assistance that is annealed with success."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.bounds import Count, Fraction, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, Teacher


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """Settings of the privileged-action curriculum."""

    name: str = "help"  # the task parameter that is the assistance
    first: Fraction = 1.0  # initial level p
    step: PositiveFraction = 0.03  # change of p after success or failure
    enough: Fraction = 0.7  # mean score above which p decreases
    little: Fraction = 0.3  # mean score below which p increases
    batch: Count = 100  # episodes of that mean
    below: Fraction = 0.25  # an episode gets up to this much less than p, at least 0


class Privilege(Teacher):
    """Privileged-action curriculum: assistance that falls with success and rises with failure.

    One element of the task vector is the amount of assistance. Its level is p; an episode gets
    p - below u^2 with u uniform in [0, 1], so that the student also trains with less assistance. If
    the mean score of the last `batch` episodes at this p is above `enough`, p decreases by `step`;
    below `little` it increases. The other task parameters are sampled uniformly. Evaluation runs
    without assistance, which is the environments' default. `level` is p, in whole steps below
    `first`.
    """

    needs = "help"
    in_order = True
    remembered = ("level", "recent")

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        names = () if spec.task is None else spec.task.names
        if config.name not in names:
            raise ConfigError(
                f'this teacher needs an environment with assistance in its task ("{config.name}"): '
                "env=fr3_lift_magnet"
            )
        super().__init__(config, spec, seed)
        if config.name not in self.space.names:
            raise ConfigError(f"teacher.box fixes {config.name}: the assistance cannot be annealed")
        if config.little >= config.enough:
            raise ConfigError("teacher: needs little < enough")
        self.place = self.space.names.index(config.name)
        self.level = float(config.first)
        self.recent: deque[float] = deque(maxlen=config.batch)

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        points = self.random.random((n, len(self.space)))
        less = self.config.below * self.random.random(n) ** 2
        points[:, self.place] = np.maximum(self.level - less, 0)
        return [(point, self.level) for point in points]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        """Ignores episodes that were sampled at another p."""
        for score, level in zip(scores, memos, strict=True):
            if level != self.level:
                continue
            self.recent.append(float(score))
            if len(self.recent) < self.config.batch:
                continue
            mean = float(np.mean(self.recent))
            if mean > self.config.enough:
                self._move(-1)
            elif mean < self.config.little:
                self._move(1)

    def _move(self, way: int) -> None:
        level = round(self.level + way * self.config.step, 6)
        level = min(max(level, 0.0), self.config.first)
        if level != self.level:
            self.level = level
            self.recent.clear()

    def metrics(self) -> dict[str, float]:
        return {"help": self.level}
