"""Scaled reward: the environment's reward times a constant. Evaluation is not affected.

Value functions, temperatures and distributional supports depend on the scale of the reward: this
tests how sensitive a learner's settings are to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embodied.core.bounds import Number
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Config:
    """Settings of the scaled reward."""

    factor: Number = 1.0  # factor of the environment's reward


class Scaled(Reward):
    """Applied once, when transitions are stored."""

    frozen = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, transitions: Tensors) -> Tensor:
        return self.config.factor * transitions["reward"]
