"""Uniform task sampling, the baseline of all teachers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.task_space import Floats


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """No settings of its own."""


class Uniform(teacher.Teacher):
    """Samples tasks uniformly from the box; does not adapt."""

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        return [(point, None) for point in self.random.random((n, len(self.space)))]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        pass
