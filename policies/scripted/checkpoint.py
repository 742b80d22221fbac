"""CheckpointDemonstrator: a trained checkpoint as a demonstrator, with optional action noise.

With probability `random` a decision is uniform, else it is clip(a + noise e, -1, 1), e ~ N(0, I).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.bounds import Fraction, NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Config:
    """Settings of a demonstrator from a run."""

    run: str  # a run or checkpoint folder
    explore: bool = False  # act with exploration noise
    noise: NonNegative = 0.0  # std of added noise, of half the action range
    random: Fraction = 0.0  # share of uniform decisions
    settings: Mapping[str, Any] = field(default_factory=dict)  # other settings of the policy


class CheckpointDemonstrator(Policy):
    """Noise [n, D]: the policy's own, flat; what is added to its actions; whether a decision is
    uniform, and if so which."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if not spec.act.is_continuous and (config.noise or config.random):
            raise ConfigError("noise and random need continuous actions")
        base = checkpoint.load_policy(config.run, spec)
        settings = config.settings
        self.base = checkpoint.with_settings(base, settings, config.run) if settings else base
        self.spec = spec
        self.chunk = self.base.chunk
        self.config = config
        self.size = self.chunk * spec.act.size
        self.shape = self.base.sample_noise(1).shape[1:]

    def initial(self, n: int) -> Tensors:
        return self.base.initial(n)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        own = self.base.sample_noise(n, self.config.explore).flatten(1)
        device = own.device
        added = torch.randn(n, self.size, device=device)
        uniform = torch.rand(n, self.size + 1, device=device)
        return torch.cat([own.float(), added, uniform], 1)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return self.base.observe(obs, carry, self._own(noise))

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        action, carry = self.base.act(obs, carry, self._own(noise))
        if not (self.config.noise or self.config.random):
            return action, carry
        added, uniform = noise[:, -2 * self.size - 1 :].split([self.size, self.size + 1], 1)
        noisy = (action + self.config.noise * added.view_as(action)).clamp(-1, 1)
        lost = uniform[:, 0] < self.config.random
        blind = (2 * uniform[:, 1:] - 1).view_as(action)
        return torch.where(lost.view(-1, *[1] * (action.ndim - 1)), blind, noisy), carry

    def _own(self, noise: Tensor) -> Tensor:
        return noise[:, : -2 * self.size - 1].view(-1, *self.shape)
