"""Scripted race-car drivers: a slow lap through the waypoints, and recovery from a wall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from embodied.core.bounds import Bound, NonNegative
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Config:
    """Settings of the lap driver."""

    throttle: Annotated[float, Bound(-1.0, 1.0)] = 0.0  # of the whole lap
    gain: NonNegative = 1.6  # steering per bearing of the goal, 1/rad
    unsteady: NonNegative = 0.1  # standard deviation of the noise on throttle and steering


class Lap(Policy):
    """Drives towards the goal at constant speed. Noise is [n, 2]."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        names = spec.obs["state"].names
        if not {"goal_ahead", "goal_left"} <= {*names}:
            raise ConfigError("Lap needs the state elements goal_ahead and goal_left; set env=race")
        self.index = [names.index(name) for name in ("goal_ahead", "goal_left")]

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, 2)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        ahead, left = obs["state"][:, self.index].unbind(1)
        steer = self.config.gain * torch.atan2(left, ahead)
        action = torch.stack([steer, torch.full_like(steer, self.config.throttle)], 1)
        return (action + self.config.unsteady * noise).clamp(-1, 1)[:, None], carry


@dataclass(frozen=True)
class FreeConfig:
    """Recovery drives backwards at full throttle."""


class Free(Policy):
    """Drives backwards with one random steering angle per recovery (FastRLAP). Noise is [n, 1]."""

    def __init__(self, config: FreeConfig, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def initial(self, n: int) -> Tensors:
        return {"steer": torch.full((n,), torch.nan)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.rand(n, 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        drawn = 2 * noise[:, 0] - 1
        steer = torch.where(carry["steer"].isnan(), drawn, carry["steer"])
        return torch.stack([steer, -torch.ones_like(steer)], 1)[:, None], {"steer": steer}
