"""CLUTR: a generator in the latent space of pretrained levels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.bounds import Bound, Count, NonNegative, Positive, PositiveFraction
from embodied.core.spec import Spec
from embodied.nn.optim import Adam, Optimizer, gradient_step
from embodied.teachers.levels.regret import (
    Config,
    Grammar,
    RegretTeacher,
    Words,
    normal,
    surrogate,
)
from embodied.teachers.teacher import Floats, LevelSpace
from embodied.teachers.torch_teacher import embedding, gru, linear, tensor

EDGE = 4.0  # bound of latents


@dataclass(frozen=True)
class AutoencoderSettings:
    """Settings of the autoencoder, which is trained before the first episode."""

    pool: Count = 20_000  # random levels to train on
    steps: Count = 2_000  # gradient steps
    batch: Count = 64  # levels per gradient step
    lr: PositiveFraction = 2e-3  # Adam's learning rate
    latent: Count = 16  # size of z
    embedding: Count = 32  # size of a token's embedding
    reader: Count = 64  # units of the encoder's GRU, in each direction
    writer: Count = 128  # units of the decoder's GRU
    blur: Annotated[float, Bound(0.0, below=1.0)] = 0.3  # dropout of the decoder's input tokens
    weight: Positive = 79.0  # c, weight of the cross-entropy
    warm: Positive = 150.0  # k, steps of the warm-up of the KL weight
    bounded: bool = False  # replace z by 4 tanh(z), as in the paper


class LevelAutoencoder(nn.Module):
    """A recurrent VAE (Kingma and Welling, 2014). An embedding and a bidirectional GRU read the
    tokens w_1 .. w_T [n, T] of levels; its last states give the posterior q(z | w) =
    N(mu, sigma^2). A GRU that gets z [n, Z] with every token decodes them greedily.

        L = c CE(w) + beta_i KL(q || N(0, I)),   beta_i = (tanh((i - 3.5 k) / k) + 1) / 2

    CE is the mean over tokens; the paper has c = 79, k = 1000.
    """

    def __init__(
        self, settings: AutoencoderSettings, grammar: Grammar, random: np.random.Generator
    ) -> None:
        super().__init__()
        self.settings = settings
        self.grammar = grammar
        latent, size = settings.latent, settings.embedding
        # One token more: the start token.
        self.embedding = embedding(grammar.words + 1, size, random)
        self.reader = gru(size, settings.reader, random, both_ways=True)
        self.where = linear(2 * settings.reader, 2 * latent, random)
        self.begin = linear(latent, settings.writer, random)
        self.writer = gru(size + latent, settings.writer, random)
        self.word = linear(settings.writer, grammar.words, random)

    def read(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """mu and log sigma^2 [n, Z] of tokens [n, T]."""
        _, last = self.reader(self.embedding(words))
        mean, log = self.where(torch.cat([last[0], last[1]], 1)).chunk(2, 1)
        return mean, log

    def bound(self, z: Tensor) -> Tensor:
        return EDGE * torch.tanh(z) if self.settings.bounded else z

    def logits(self, z: Tensor, words: Tensor, kept: Tensor | float = 1.0) -> Tensor:
        """[n, T, V] of each token given those before it; `kept` [n, T, E] is the dropout mask."""
        start = torch.full_like(words[:, :1], self.grammar.words)
        before = self.embedding(torch.cat([start, words[:, :-1]], 1)) * kept
        told = z[:, None].expand(-1, words.shape[1], -1)
        hidden, _ = self.writer(torch.cat([before, told], 2), torch.tanh(self.begin(z))[None])
        return self._allowed(self.word(hidden), 0)

    @torch.no_grad()
    def write(self, z: Tensor) -> Words:
        """Greedy decoding to tokens [n, T] of latents [n, Z], which are bounded already."""
        word = torch.full((len(z), 1), self.grammar.words)
        hidden, words = torch.tanh(self.begin(z))[None], []
        for t in range(self.grammar.length):
            out, hidden = self.writer(torch.cat([self.embedding(word), z[:, None]], 2), hidden)
            word = self._allowed(self.word(out), t).argmax(2)
            words.append(word)
        return torch.cat(words, 1).numpy()

    def _allowed(self, logits: Tensor, first: int) -> Tensor:
        """Logits [n, k, V] of tokens from `first` on, in which no mark is the last token."""
        marks = max(0, self.grammar.marks - first)
        barred = torch.zeros(logits.shape[1:])
        barred[:marks, -1] = -torch.inf
        return logits + barred


def beta(step: int, warm: float) -> float:
    """The weight of the KL term in training step `step`."""
    return (math.tanh((step - 3.5 * warm) / warm) + 1) / 2


def divergence(mean: Tensor, log: Tensor) -> Tensor:
    """KL(N(mean, exp(log)) || N(0, I)), [n], of mean and log [n, Z]."""
    return 0.5 * (mean.square() + log.exp() - log - 1).sum(1)


def train(
    model: LevelAutoencoder,
    optimizer: Optimizer,
    pool: Words,
    random: np.random.Generator,
) -> dict[str, float]:
    """Train for all steps; returns running means to log."""
    settings, grammar = model.settings, model.grammar
    levels, noted = torch.from_numpy(pool), {"written": 0.0, "kl": 0.0}
    shape = (settings.batch, grammar.length, settings.embedding)
    for step in range(settings.steps):
        words = levels[torch.from_numpy(random.integers(len(levels), size=settings.batch))]
        lots = torch.from_numpy(random.random(shape, dtype=np.float32))
        kept = (lots >= settings.blur).float() / (1 - settings.blur)
        mean, log = model.read(words)
        noise = torch.from_numpy(random.standard_normal(mean.shape, dtype=np.float32))
        z = model.bound(mean + (0.5 * log).exp() * noise)
        logits = model.logits(z, words, kept)
        error = F.cross_entropy(logits.flatten(0, 1), words.flatten())
        kl = divergence(mean, log).mean()
        gradient_step(optimizer, settings.weight * error + beta(step, settings.warm) * kl)
        right = (logits.detach().argmax(2) == words).float().mean().item()
        share = 1.0 if not step else 0.02
        new = {"written": right, "kl": kl.item()}
        noted = {key: noted[key] + share * (new[key] - noted[key]) for key in noted}
    return noted


@dataclass(frozen=True, kw_only=True)
class ClutrConfig(Config):
    """Settings of CLUTR; those after `autoencoder` are of the adversary's PPO."""

    autoencoder: AutoencoderSettings = field(default_factory=AutoencoderSettings)  # of the levels
    lr: PositiveFraction = 1e-2  # Adam's learning rate
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


class Clutr(RegretTeacher):
    """CLUTR: PAIRED with an adversary that samples from the latent space of pretrained levels.

    Azad et al., "CLUTR: curriculum learning via unsupervised task representation learning", 2023.
    An autoencoder is trained on random levels when the first level is generated, and then frozen.
    The adversary samples a latent z and learns by one-step PPO from the regret of the decoded
    level:

        z ~ N(m, diag s^2),   L = E[ -min(rho A, clip(rho, 1 - eps, 1 + eps) A) ] - c_h sum log s
    """

    remembered = ("z", "learned", "noted")

    def __init__(
        self, config: ClutrConfig, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.sentences = LevelAutoencoder(config.autoencoder, self.grammar, self.random)
        self.place = LatentGaussian(config.autoencoder.latent)
        self.modules = {"sentences": self.sentences, "place": self.place}
        self.optimizers = {"adam": Adam(self.place.parameters(), config.lr, local=True)}
        self.z = torch.zeros(0, config.autoencoder.latent)
        self.learned = False
        self.noted = {}

    def generate(self, n: int) -> Floats:
        if not self.learned:
            settings = self.config.autoencoder
            pool = self.spelled.spell(self.levels.random(settings.pool, self.random))
            adam = Adam(self.sentences.parameters(), settings.lr, local=True)
            noted = train(self.sentences, adam, pool, self.random)
            words = torch.from_numpy(pool[:256])
            with torch.no_grad():
                again = self.sentences.write(self.sentences.bound(self.sentences.read(words)[0]))
            self.noted = {**noted, "kept": float(np.mean(again == pool[:256]))}
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
        place, settings = self.place, self.config
        advantage = normal(tensor(regrets))
        old = place(self.z).detach()
        for _ in range(settings.epochs):
            loss = surrogate(place(self.z), old, advantage, settings.clip).mean()
            gradient_step(self.optimizers["adam"], loss - settings.entropy * place.log.sum())
        return {"spread": float(place.log.detach().exp().mean()), **self.noted}
