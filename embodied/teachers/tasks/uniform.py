"""Uniform task sampling, the baseline of all teachers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError
from embodied.core.files import MALFORMED, reading
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, Teacher, named_task


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """Settings of uniform tasks."""

    fixed: str | None = None  # a worst_case.json: all tasks have its worst parameters


class Uniform(Teacher):
    """Samples tasks uniformly from the box; does not adapt. With `fixed`, the parameters of that
    file have its values in every task."""

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        named = {} if config.fixed is None else read_worst(Path(config.fixed))
        self.point = named_task(self.space, named, 0.0, "fixed")
        self.free = [name not in named for name in self.space.names]

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        points = self.point + self.free * self.random.random((n, len(self.space)))
        return [(point, None) for point in points]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        pass


def read_worst(file: Path) -> dict[str, float]:
    """The worst parameters, in [0, 1] by name, that `embodied eval RUN worst_case=true` wrote."""
    if not file.exists():
        raise ConfigError(f"{file} is missing; embodied eval RUN worst_case=true writes it")
    with reading(str(file), *MALFORMED):
        return {
            str(name): float(value) for name, value in json.loads(file.read_text())["worst"].items()
        }
