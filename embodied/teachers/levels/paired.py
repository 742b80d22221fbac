"""PAIRED: an adversary generates levels and is rewarded with the student's regret on them.

Dennis et al., "Emergent complexity and zero-shot transfer via unsupervised environment design",
2020. The adversary generates a level token by token (level_generator.py); its reward is the regret
of the finished level (regret.py). The student (protagonist) and the antagonist are both trained on
the environment's reward.
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
    """Settings of PAIRED."""

    adversary: Settings = field(default_factory=Settings)  # PPO of the level generator


class Paired(regret.RegretTeacher):
    """Keeps the tokens, log-probabilities and values of the round's levels until the PPO update."""

    remembered = ("words", "old", "value")

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.settings = config.adversary
        self.spelled = spelled(self.levels)
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
    """`levels`, checked to be a TokenizedLevelSpace; ConfigError otherwise."""
    if not isinstance(levels, TokenizedLevelSpace):
        raise ConfigError(
            "this teacher generates levels token by token; the levels of this environment have no "
            "token encoding (TokenizedLevelSpace): use env=maze"
        )
    return levels
