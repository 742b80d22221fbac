"""Paired: an adversary builds levels, and is paid the regret of the student on them.

Source: Dennis et al., "Emergent complexity and zero-shot transfer via unsupervised environment
design" (PAIRED), 2020. The adversary puts one word of a level after another (builder.py) and earns
the level's regret (regret.py) when it is finished. Both students are paid by the world; as the
rival gets better on what the student cannot do, it raises the regret by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers.levels import regret
from embodied.teachers.levels.level_generator import Grammar, LevelGenerator, Settings, improve
from embodied.teachers.levels.level_teacher import LevelSpace, TokenizedLevelSpace
from embodied.teachers.task_space import Floats
from embodied.teachers.torch_teacher import tensor


@dataclass(frozen=True, kw_only=True)
class Config(regret.Config):
    """`adversary`: how it learns."""

    adversary: Settings = field(default_factory=Settings)


class Paired(regret.RegretTeacher):
    """What was said of the round's levels, how likely it was and what it was thought to be worth is
    kept until their regret is known."""

    remembered = (*regret.RegretTeacher.remembered, "words", "old", "value")

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.settings, self.spelled = config.adversary, spelled(self.levels)
        space = self.spelled
        grammar = Grammar(space.words, space.length, space.marks)
        self.builder = LevelGenerator(grammar, self.settings.width, self.random)
        self.modules = {"builder": self.builder}
        self.optimizers = {"adam": torch.optim.Adam(self.builder.parameters(), self.settings.lr)}
        self.words = np.zeros((0, grammar.length), np.int64)
        self.old = self.value = torch.zeros(0, grammar.length)

    def generate(self, n: int) -> Floats:
        self.words, self.old, self.value = self.builder.generate(n, self.random)
        return self.spelled.built(self.words, self.random)

    def update_generator(self, regrets: Floats) -> dict[str, float]:
        adam, batch = self.optimizers["adam"], (self.words, self.old, self.value)
        return improve(self.builder, adam, self.settings, *batch, tensor(regrets))


def spelled(levels: LevelSpace) -> TokenizedLevelSpace:
    """The same levels, if they can be written in words."""
    if not isinstance(levels, TokenizedLevelSpace):
        raise ConfigError("this teacher builds levels word by word; those of this world cannot be")
    return levels
