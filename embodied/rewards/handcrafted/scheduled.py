"""Reward curriculum: a weighted reward whose weights increase during training.

    w_k(step) = min(limit_k, start_k factor_k^(step // every))

From "Learning to Fly in Seconds" (Eschmann et al., 2024). Transitions are rewarded when they are
sampled, with the current weights, which equals rewriting all stored rewards at each change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied.core.bounds import Count, Number
from embodied.core.build import ConfigError, named_function
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class ScaledConfig:
    """Settings of the scaled reward."""

    factor: Number = 1.0  # factor of the environment's reward


class Scaled(Reward):
    """The environment's reward times a constant, applied once, when transitions are stored.

    Evaluation is not affected. It tests how sensitive a learner's settings are to the scale.
    """

    frozen = True

    def __init__(self, config: ScaledConfig) -> None:
        self.config = config

    def __call__(self, transitions: Tensors) -> Tensor:
        return self.config.factor * transitions["reward"]


@dataclass(frozen=True)
class Config:
    """Settings of the reward curriculum; weights are by name."""

    function: str  # dotted name of f(transitions, weights, **settings) -> [N]
    start: dict[str, Number]  # initial weights
    factor: dict[str, Number] = field(default_factory=dict)  # growth of a weight; default 1
    limit: dict[str, Number] = field(default_factory=dict)  # largest weight; default none
    every: Count = 100_000  # environment steps between increases
    settings: dict[str, Number] = field(default_factory=dict)  # further arguments of `function`


class ScheduledWeights(Reward):
    """Weights depend on the step alone, so there is no state to save."""

    frozen = False

    def __init__(self, config: Config) -> None:
        if unknown := ({*config.factor} | {*config.limit}) - {*config.start}:
            raise ConfigError(f"reward.start has no {min(unknown)}; it must name every weight")
        self.config = config
        self.function = named_function(config.function, "scheduled reward")
        self.bumps = -1
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Use the weights of environment step `step`."""
        bumps = step // self.config.every
        if bumps == self.bumps:
            return
        self.bumps = bumps
        limit = self.config.limit
        factor = self.config.factor
        self.weights = {
            name: min(limit.get(name, float("inf")), value * factor.get(name, 1.0) ** bumps)
            for name, value in self.config.start.items()
        }
        self.metrics = {name: torch.tensor(value) for name, value in self.weights.items()}

    def __call__(self, transitions: Tensors) -> Tensor:
        return self.function(transitions, self.weights, **self.config.settings)

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        """Nothing to learn; returns the weights, for the log."""
        return self.metrics
