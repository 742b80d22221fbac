"""Demonstrator for the two-gap environment: each gap with probability one half, with noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import NonNegative
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

BEFORE = 0.42
BEHIND = 0.56
GAPS = (0.25, 0.75)
GOAL = (0.95, 0.5)


@dataclass(frozen=True)
class Config:
    """Settings of the demonstrator."""

    unsteady: NonNegative = 0.25  # standard deviation of the noise on its velocity


class TwoGapDemonstrator(Policy):
    """Noise is [n, 3]: the choice of the gap (once an episode), and what it adds to x and y."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.unsteady = config.unsteady

    def initial(self, n: int) -> Tensors:
        return {"gap": torch.zeros(n)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, 3)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        choice = torch.where(noise[:, 0] > 0, GAPS[0], GAPS[1])
        gap = torch.where(carry["gap"] == 0, choice, carry["gap"])
        x, y = obs["state"].unbind(1)
        lined_up = (y - gap).abs() < 0.04
        entrance = torch.stack([torch.full_like(x, BEFORE), gap], 1)
        through = torch.stack([torch.full_like(x, BEHIND + 0.04), gap], 1)
        aim = torch.where((lined_up | (x > BEFORE + 0.02))[:, None], through, entrance)
        aim = torch.where((x > BEHIND)[:, None], torch.tensor(GOAL), aim)
        way = (aim - obs["state"]) / 0.05
        way = way / way.norm(dim=1, keepdim=True).clamp(min=1)
        return (way + self.unsteady * noise[:, 1:]).clamp(-1, 1)[:, None], {"gap": gap}
