"""Random: uniform or clipped normal actions, independent of observations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Chunk, NonNegative
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, length


@dataclass(frozen=True)
class Config:
    """Settings of the random policy."""

    chunk: Chunk = 1  # actions of one decision
    clip: NonNegative = 0.0  # N(0, 1) clipped to +-clip and divided by it (0: uniform in [-1, 1])


class Random(Policy):
    """Random policy; each allowed class of a choice is as likely."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if config.clip > 0 and not spec.act.is_continuous:
            raise ConfigError("clip needs continuous actions: leave it out")
        self.config = config
        self.spec = spec
        self.chunk = config.chunk
        self.choices = Choices(spec, config.chunk)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        shape = (n, self.chunk, *self.spec.act.shape)
        if self.config.clip > 0:
            return torch.randn(shape)
        return torch.rand(shape)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        noise = noise.to(next(iter(obs.values())).device)
        assert len(noise) == length(obs)
        if self.choices.counts:
            return self.choices.to(noise.device).random(noise, obs), carry
        if self.config.clip > 0:
            return noise.clamp(-self.config.clip, self.config.clip) / self.config.clip, carry
        return 2 * noise - 1, carry
