"""Domain randomization (Tobin et al., 2017): a random level for every episode.

The baseline that every teacher of levels is compared with.
"""

from __future__ import annotations

from typing import Any

from embodied.teachers.teacher import Floats, LevelTeacher


class DomainRandomization(LevelTeacher):
    """Samples levels with `levels.random`; does not adapt."""

    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        return [(level, None) for level in self.levels.random(n, self.random)]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        pass
