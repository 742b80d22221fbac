"""Domain randomization: random levels."""

from __future__ import annotations

from typing import Any

from embodied.teachers.teacher import Floats, LevelTeacher


class DomainRandomization(LevelTeacher):
    """A random level for every episode (Tobin et al., 2017); the baseline of all level teachers."""

    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        return [(level, None) for level in self.levels.random(n, self.random)]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        pass
