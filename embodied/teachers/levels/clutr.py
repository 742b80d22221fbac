"""CLUTR: PAIRED with an adversary that samples from the latent space of pretrained levels.

Azad et al., "CLUTR: curriculum learning via unsupervised task representation learning", 2023. An
autoencoder is trained on random levels and then frozen. The adversary samples a latent z and learns
by one-step PPO from the regret of the decoded level:

    z ~ N(m, diag s^2),   L = E[ -min(rho A, clip(rho, 1 - eps, 1 + eps) A) ] - c_h sum log s
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, NonNegative, Positive
from embodied.core.spec import Spec
from embodied.nn.fit import gradient_step
from embodied.teachers.levels import regret
from embodied.teachers.levels.level_autoencoder import EDGE, LevelAutoencoder, train
from embodied.teachers.levels.level_autoencoder import Settings as AutoencoderSettings
from embodied.teachers.levels.level_generator import Grammar, normal, surrogate
from embodied.teachers.levels.level_teacher import LevelSpace
from embodied.teachers.levels.regret import spelled
from embodied.teachers.task_space import Floats
from embodied.teachers.torch_teacher import tensor


@dataclass(frozen=True, kw_only=True)
class Config(regret.Config):
    """Settings of CLUTR; those after `autoencoder` are of the adversary's PPO."""

    autoencoder: AutoencoderSettings = field(default_factory=AutoencoderSettings)  # of the levels
    lr: Positive = 1e-2  # Adam's learning rate
    epochs: Count = 5  # gradient steps per round
    clip: Positive = 0.2  # PPO's clip range of the probability ratio
    entropy: NonNegative = 0.01  # weight of the entropy bonus


class LatentGaussian(nn.Module):
    """A diagonal normal distribution over latents, initially the standard one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(size))
        self.log = nn.Parameter(torch.zeros(size))

    def forward(self, z: Tensor) -> Tensor:
        """Log density [n] at z [n, Z]."""
        apart = (z - self.mean) * (-self.log).exp()
        return -(0.5 * apart.square() + self.log + 0.5 * math.log(2 * math.pi)).sum(1)


class Clutr(regret.RegretTeacher):
    """The autoencoder is trained when the first level is generated, with the teacher's seed."""

    remembered = ("z", "learned", "noted")

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.settings = config
        self.spelled = spelled(self.levels)
        space = self.spelled
        grammar = Grammar(space.words, space.length, space.marks)
        self.sentences = LevelAutoencoder(config.autoencoder, grammar, self.random)
        self.place = LatentGaussian(config.autoencoder.latent)
        self.modules = {"sentences": self.sentences, "place": self.place}
        self.optimizers = {"adam": torch.optim.Adam(self.place.parameters(), config.lr)}
        self.z = torch.zeros(0, config.autoencoder.latent)
        self.learned = False
        self.noted = {}

    def generate(self, n: int) -> Floats:
        if not self.learned:
            self.noted = self._learn_levels()
            self.learned = True
        place = self.place
        with torch.no_grad():
            self.z = place.mean + place.log.exp() * self.normal(n, len(place.mean))
        return self.written(self.z)

    def written(self, z: Tensor) -> Floats:
        """Levels [n, D] decoded from latents [n, Z]."""
        words = self.sentences.write(self.sentences.bound(z.clamp(-EDGE, EDGE)))
        return self.spelled.built(words, self.random)

    def update_generator(self, regrets: Floats) -> dict[str, float]:
        place, settings = self.place, self.settings
        advantage = normal(tensor(regrets))
        old = place(self.z).detach()
        for _ in range(settings.epochs):
            loss = surrogate(place(self.z), old, advantage, settings.clip).mean()
            gradient_step(self.optimizers["adam"], loss - settings.entropy * place.log.sum())
        return {"spread": float(place.log.detach().exp().mean()), **self.noted}

    def _learn_levels(self) -> dict[str, float]:
        settings = self.settings.autoencoder
        pool = self.spelled.spell(self.levels.random(settings.pool, self.random))
        adam = torch.optim.Adam(self.sentences.parameters(), settings.lr, fused=True)
        noted = train(self.sentences, adam, pool, self.random)
        words = torch.from_numpy(pool[:256])
        with torch.no_grad():
            again = self.sentences.write(self.sentences.bound(self.sentences.read(words)[0]))
        return {**noted, "kept": float(np.mean(again == pool[:256]))}
