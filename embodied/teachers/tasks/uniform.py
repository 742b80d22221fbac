"""Uniform: every task as often as every other. What a teacher has to be better than."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.task_space import Floats


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """Nothing of its own."""


class Uniform(teacher.Teacher):
    """Learns nothing."""

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        return [(point, None) for point in self.random.random((n, len(self.space)))]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        pass
