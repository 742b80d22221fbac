"""A script that moves nothing: what stands behind a person who drives the arm all the time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, length


@dataclass(frozen=True)
class Config:
    """Nothing."""


class Still(Policy):
    """Zeros, whatever it sees."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 0)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return torch.zeros(length(obs), 1, self.spec.act.size), carry
