"""Clutr: as paired, but the adversary chooses a place among levels that were learned before.

Source: Azad et al., "CLUTR: curriculum learning via unsupervised task representation learning",
2023. An autoencoder learns to write random levels (sentences.py) and is left alone then; the
adversary draws a latent z, and learns by PPO with one step from the regret of the level written:

    z ~ N(m, diag s^2),   L = E[ -min(rho A, clip(rho, 1 - eps, 1 + eps) A) ] - c_h sum log s
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.spec import Spec
from embodied.teachers.levels import level_autoencoder, regret
from embodied.teachers.levels.level_autoencoder import EDGE, Sentences, teach
from embodied.teachers.levels.level_generator import Grammar, normal, surrogate
from embodied.teachers.levels.level_teacher import LevelSpace
from embodied.teachers.levels.paired import spelled
from embodied.teachers.task_space import Floats
from embodied.teachers.torch_teacher import descend, tensor


@dataclass(frozen=True, kw_only=True)
class Config(regret.Config):
    """`autoencoder`: of levels, learned before the first episode; the others: how the adversary
    learns."""

    autoencoder: level_autoencoder.Settings = field(default_factory=level_autoencoder.Settings)
    lr: float = 1e-2
    epochs: int = 5
    clip: float = 0.2
    entropy: float = 0.01


class Place(nn.Module):
    """A normal distribution over latents: at first that of random levels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mean, self.log = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))

    def forward(self, z: Tensor) -> Tensor:
        """Logarithms of the density at z [n, Z], [n]."""
        apart = (z - self.mean) * (-self.log).exp()
        return -(0.5 * apart.square() + self.log + 0.5 * math.log(2 * math.pi)).sum(1)


class Clutr(regret.Regretful):
    """The autoencoder learns when the first level is asked for, from the teacher's own seed."""

    remembered = (*regret.Regretful.remembered, "z", "learned", "noted")

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.settings, self.spelled = config, spelled(self.levels)
        space = self.spelled
        grammar = Grammar(space.words, space.length, space.marks)
        self.sentences = Sentences(config.autoencoder, grammar, self.random)
        self.place = Place(config.autoencoder.latent)
        self.modules = {"sentences": self.sentences, "place": self.place}
        self.optimizers = {"adam": torch.optim.Adam(self.place.parameters(), config.lr)}
        self.z = torch.zeros(0, config.autoencoder.latent)
        self.learned, self.noted = False, {}

    def invent(self, n: int) -> Floats:
        if not self.learned:
            self.noted, self.learned = self._learn_levels(), True
        place = self.place
        with torch.no_grad():
            self.z = place.mean + place.log.exp() * self.normal(n, len(place.mean))
        return self.written(self.z)

    def written(self, z: Tensor) -> Floats:
        """Levels [n, D] at latents [n, Z]."""
        words = self.sentences.write(self.sentences.bound(z.clamp(-EDGE, EDGE)))
        return self.spelled.built(words, self.random)

    def blame(self, regrets: Floats) -> dict[str, float]:
        place, settings = self.place, self.settings
        advantage = normal(tensor(regrets))
        old = place(self.z).detach()
        for _ in range(settings.epochs):
            loss = surrogate(place(self.z), old, advantage, settings.clip).mean()
            descend(self.optimizers["adam"], loss - settings.entropy * place.log.sum())
        return {"spread": float(place.log.detach().exp().mean()), **self.noted}

    def _learn_levels(self) -> dict[str, float]:
        settings = self.settings.autoencoder
        pool = self.spelled.spell(self.levels.random(settings.pool, self.random))
        adam = torch.optim.Adam(self.sentences.parameters(), settings.lr, fused=True)
        noted = teach(self.sentences, adam, pool, self.random)
        words = torch.from_numpy(pool[:256])
        with torch.no_grad():
            again = self.sentences.write(self.sentences.bound(self.sentences.read(words)[0]))
        return {**noted, "kept": float(np.mean(again == pool[:256]))}
