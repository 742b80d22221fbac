"""PAIRED: a generator that writes levels token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from embodied.core.spec import Spec
from embodied.nn.optim import Adam
from embodied.teachers.levels.regret import Config, LevelGenerator, RegretTeacher, Settings, improve
from embodied.teachers.teacher import Floats, LevelSpace
from embodied.teachers.torch_teacher import tensor


@dataclass(frozen=True, kw_only=True)
class PairedConfig(Config):
    """Settings of PAIRED."""

    adversary: Settings = field(default_factory=Settings)  # PPO of the level generator


class Paired(RegretTeacher):
    """PAIRED: an adversary generates levels on which the antagonist beats the student. Both agents
    are trained on the environment's reward, the adversary on the regret.

    Keeps the tokens, log-probabilities and values of the round's levels until the PPO update.
    """

    remembered = ("words", "old", "value")

    def __init__(
        self, config: PairedConfig, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.settings = config.adversary
        self.builder = LevelGenerator(self.grammar, self.settings.width, self.random)
        self.modules = {"builder": self.builder}
        self.optimizers = {"adam": Adam(self.builder.parameters(), self.settings.lr, local=True)}
        self.words = np.zeros((0, self.grammar.length), np.int64)
        self.old = self.value = torch.zeros(0, self.grammar.length)

    def generate(self, n: int) -> Floats:
        self.words, self.old, self.value = self.builder.generate(n, self.random)
        return self.spelled.built(self.words, self.random)

    def update_generator(self, regrets: Floats) -> dict[str, float]:
        adam, batch = self.optimizers["adam"], (self.words, self.old, self.value)
        return improve(self.builder, adam, self.settings, *batch, tensor(regrets))
