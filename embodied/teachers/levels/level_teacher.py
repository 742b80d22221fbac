"""Levels: what teachers of whole levels (mazes, courses) ask of a world, and what they share.

A level is the task vector, so that tickets, diaries and resumed runs know nothing of it; the
world brings a `LevelSpace`, which knows how to draw and edit such vectors (its attribute `levels`;
`spec.task.unit` is "level").
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.task_space import Floats

LEVEL = "level"  # the unit of task vectors that are levels
RECENT = 64  # proposed levels that the log describes


class LevelSpace(Protocol):
    """Levels [n, D], each number in [0, 1]. Whatever is drawn or edited can be solved, and is none
    of those that are held out for evaluation."""

    size: int  # D
    held_out: Floats

    def random(self, n: int, random: np.random.Generator) -> Floats:
        """n of any kind."""
        ...

    def plain(self, n: int, random: np.random.Generator) -> Floats:
        """n of the simplest kind."""
        ...

    def mutate(self, levels: Floats, edits: int, random: np.random.Generator) -> Floats:
        """Each of them with so many small changes."""
        ...

    def solvable(self, levels: Floats) -> NDArray[np.bool_]:
        """[n]: whether there is a way to succeed."""
        ...

    def picture(self, level: Floats) -> NDArray[np.uint8]:
        """One level [D] as a picture [h, w, 3]."""
        ...

    def traits(self, levels: Floats) -> dict[str, float]:
        """Means over levels, for the log."""
        ...


@runtime_checkable
class Spelled(LevelSpace, Protocol):
    """Levels that can be written as `length` words from 0 to `words` - 1. The first `marks` each
    have a meaning of their own; of the others the order does not matter, and the last of the words
    means nothing."""

    words: int
    length: int
    marks: int

    def spell(self, levels: Floats) -> NDArray[np.int64]:
        """[n, length]: the words of levels [n, D], those after the marks in rising order."""
        ...

    def built(self, words: NDArray[np.int64], random: np.random.Generator) -> Floats:
        """Levels [n, D] from words [n, length], one after the other; one that would leave no way is
        left out. What words do not say is drawn."""
        ...


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """`box` is of no use here: a level is taken whole."""


class Leveled(teacher.Teacher):
    """Subclasses say which levels (`choose`)."""

    needs = frozenset({"levels"})
    remembered = ("recent",)

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        if levels is None:
            raise ConfigError(
                "this teacher needs a world made of levels (env=maze), not a box of tasks"
            )
        if config.box:
            raise ConfigError("teacher.box is of task parameters; levels are taken whole")
        super().__init__(config, spec, seed)
        if len(self.space) != levels.size:
            raise ConfigError(
                f"the world's task has {len(self.space)} numbers, its levels have {levels.size}"
            )
        self.levels = levels
        self.recent: list[Floats] = []

    @abstractmethod
    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        """Levels [D] for `n` episodes, each with what to remember of it."""

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        chosen = self.choose(n)
        self.recent = [*self.recent, *(level for level, _ in chosen)][-RECENT:]
        return chosen

    def metrics(self) -> dict[str, float]:
        return self.levels.traits(np.stack(self.recent)) if self.recent else {}
