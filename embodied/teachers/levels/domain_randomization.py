"""Domain randomization (Tobin et al., 2017): a random level for every episode.

The baseline that every teacher of levels is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodied.core.spec import Spec
from embodied.teachers.levels import level_teacher
from embodied.teachers.levels.level_teacher import LevelSpace
from embodied.teachers.task_space import Floats


@dataclass(frozen=True, kw_only=True)
class Config(level_teacher.Config):
    """No settings of its own."""


class DomainRandomization(level_teacher.LevelTeacher):
    """Samples levels with `levels.random`; does not adapt."""

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)

    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        return [(level, None) for level in self.levels.random(n, self.random)]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        pass
