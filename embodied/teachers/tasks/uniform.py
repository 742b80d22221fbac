"""Uniform task sampling, the baseline of all teachers."""

from __future__ import annotations

from typing import Any

from embodied.teachers.teacher import Floats, Teacher


class Uniform(Teacher):
    """Samples tasks uniformly from the box; does not adapt."""

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        return [(point, None) for point in self.random.random((n, len(self.space)))]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        pass
