"""Shown: does what an environment's own oracle would do, which it shows to demonstrators only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import DEMONSTRATOR, Spec
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Config:
    """Settings of a policy that plays the oracle's action."""

    unsteady: NonNegative = 0.0  # standard deviation of the noise on each action


class Shown(Policy):
    """The action in the observation `privileged/demonstrator`; noise is [n, A]."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if DEMONSTRATOR not in spec.obs:
            raise ConfigError("this environment shows no oracle; OGBench's does: env.play=true")
        self.config = config
        self.spec = spec

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.spec.act.size)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return (obs[DEMONSTRATOR] + self.config.unsteady * noise).clamp(-1, 1)[:, None], carry
