"""LevelTeacher: base class of teachers that choose whole levels (mazes, courses); LevelSpace.

This is unsupervised environment design (UED). The task vector encodes the level
(`spec.task.unit` is "level"); the environment has an attribute `levels` (`core.env.HasLevels`), a
`LevelSpace`, which samples and edits such vectors.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.task_space import Floats

LEVEL = "level"  # `Leaf.unit` of task vectors that encode levels
RECENT = 64  # newest levels, whose traits are logged


class LevelSpace(Protocol):
    """Levels as vectors [n, D] in [0, 1]. Sampled and edited levels are solvable and never among
    those held out for evaluation."""

    size: int  # D
    held_out: Floats

    def random(self, n: int, random: np.random.Generator) -> Floats:
        """n random levels."""
        ...

    def plain(self, n: int, random: np.random.Generator) -> Floats:
        """n of the simplest levels (for example, without walls)."""
        ...

    def mutate(self, levels: Floats, edits: int, random: np.random.Generator) -> Floats:
        """A copy of each level with `edits` small random edits (ACCEL)."""
        ...

    def solvable(self, levels: Floats) -> NDArray[np.bool_]:
        """[n]: whether the level can be solved."""
        ...

    def picture(self, level: Floats) -> NDArray[np.uint8]:
        """An image of one level [D], uint8 [h, w, 3]."""
        ...

    def traits(self, levels: Floats) -> dict[str, float]:
        """Means of named properties over levels, to log."""
        ...


@runtime_checkable
class TokenizedLevelSpace(LevelSpace, Protocol):
    """Levels that can be encoded as `length` tokens in [0, `words`). The first `marks` tokens
    each have a meaning of their own; the order of the others does not matter, and the last token
    value means nothing."""

    words: int
    length: int
    marks: int

    def spell(self, levels: Floats) -> NDArray[np.int64]:
        """Tokens [n, length] of levels [n, D], those after the marks in ascending order."""
        ...

    def built(self, words: NDArray[np.int64], random: np.random.Generator) -> Floats:
        """Levels [n, D] from tokens [n, length], in order; a token that would make the level
        unsolvable is skipped. What the tokens do not determine is sampled."""
        ...


class LevelTeacher(teacher.Teacher):
    """Subclasses choose levels (`choose`), whole: `box` has to stay empty."""

    needs = "levels"
    remembered = ("recent",)

    def __init__(
        self, config: teacher.Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        if levels is None:
            raise ConfigError("this teacher needs an environment with levels (env=maze)")
        if config.box:
            raise ConfigError("teacher.box applies to task parameters; levels are chosen whole")
        super().__init__(config, spec, seed)
        if len(self.space) != levels.size:
            raise ConfigError(
                f"the task vector has {len(self.space)} elements, a level has {levels.size}"
            )
        self.levels = levels
        self.recent: list[Floats] = []

    @abstractmethod
    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        """For `n` episodes: a level [D] and a memo for `learn`."""

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        chosen = self.choose(n)
        self.recent = [*self.recent, *(level for level, _ in chosen)][-RECENT:]
        return chosen

    def metrics(self) -> dict[str, float]:
        return self.levels.traits(np.stack(self.recent)) if self.recent else {}
