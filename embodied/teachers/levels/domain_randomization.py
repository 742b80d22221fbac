"""Dr: domain randomisation, a new random level for every episode.

Source: Tobin et al., 2017. What a teacher of levels has to be better than.
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
    """Nothing of its own."""


class Dr(level_teacher.Leveled):
    """Learns nothing."""

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)

    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        return [(level, None) for level in self.levels.random(n, self.random)]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        pass
