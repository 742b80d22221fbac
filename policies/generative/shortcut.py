"""Shortcut: shortcut-model policy, a flow conditioned on its step size (Frans et al., 2024).

It can be sampled with one step or many. The network s(x_t, t, d, o) is the mean velocity over the
next step of length d. For the smallest d = 1 / finest it is trained by flow matching, s = x_1 -
x_0. One in `bootstrap` samples of a batch, drawn at random, trains a longer step from two of half
the length, without gradient through the target:

    s(x_t, t, d) = (s(x_t, t, d/2) + s(x', t + d/2, d/2)) / 2,   x' = x_t + d/2 s(x_t, t, d/2),

for d = 1, 1/2 .. 2/finest and t a multiple of d. Sampling takes K = `steps` Euler steps of d = 1/K.
Differences from the published code: targets use the trained network itself, not an EMA, as in
ReinFlow (Zhang et al., 2025); the authors bootstrap the first eighth of a shuffled batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from embodied.core.bounds import Bound, Levels
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.policies.generative import flow
from embodied.policies.generative.flow import Flow


@dataclass(frozen=True)
class Config(flow.Config):
    """Settings of a shortcut policy, in addition to those of flow matching."""

    steps: Levels = 1  # sampling steps, a power of two up to `finest`
    finest: Annotated[int, Bound(2)] = 16  # steps of plain flow matching, a power of two
    bootstrap: Annotated[int, Bound(2)] = 4  # one in so many samples of a batch trains longer steps


class Shortcut(Flow):
    """Shortcut policy. Noise [n, chunk * A] is the initial sample x_0."""

    def __init__(self, config: Config, spec: Spec) -> None:
        for name, count in (("steps", config.steps), ("finest", config.finest)):
            if count & (count - 1):
                raise ConfigError(f"{name}={count} must be a power of two: 1, 2, 4, ...")
        if config.steps > config.finest:
            raise ConfigError(f"steps={config.steps} must be at most finest={config.finest}")
        super().__init__(config, spec)
        self.config = config
        self.finest_level = config.finest.bit_length() - 1
        # One vector per step size 2^-level, added to the time embedding.
        self.sizes = nn.Embedding(self.finest_level + 1, self.net.time_dim)
        nn.init.normal_(self.sizes.weight, std=0.3)

    def embedded(self) -> Tensor:
        return super().embedded() + self.sizes.weight[self.steps.bit_length() - 1]

    def velocity(self, x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """Return s [n, D] at times [n] for steps of 2^-level [n] (int64)."""
        return self.net.at(x, self.net.embed(t) + self.sizes(level), features)

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        x0 = torch.randn_like(target)
        t = torch.rand(len(target), device=target.device)
        level = torch.full_like(t, self.finest_level, dtype=torch.int64)
        # Random samples [n / bootstrap] of a batch. Not every k-th one: a batch may alternate
        # between sources. Not randperm, which synchronises with the device.
        some = torch.rand_like(t).topk(len(t) // self.config.bootstrap).indices
        level[some] = torch.randint(self.finest_level, (len(t[some]),), device=t.device)
        scale = torch.exp2(level[some])
        t[some] = (t[some] * scale).floor() / scale
        x = torch.lerp(x0, target, t[:, None])
        goal = target - x0
        goal[some] = self.longer(x[some], t[some], level[some], features[some])
        return (self.velocity(x, t, level, features) - goal).square()

    @torch.no_grad()
    def longer(self, x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """Target of a step of 2^-level: the mean velocity of two steps of half its length."""
        half = torch.exp2(-(level + 1).float())
        one = self.velocity(x, t, level + 1, features)
        two = self.velocity(x + half[:, None] * one, t + half, level + 1, features)
        return (one + two) / 2
