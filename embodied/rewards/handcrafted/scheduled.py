"""ScheduledWeights: a weighted reward whose weights grow with training, old rows included.

    w_k(step) = min(limit_k, start_k factor_k^(step // every))

The reward curriculum of Learning to Fly in Seconds (Eschmann et al., 2024). Sampled rows are always
rewarded with the weights of now, which is what rewriting all stored rewards at each change does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied.core.build import ConfigError, resolve
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Config:
    """`function`: dotted name of `f(rows, weights, **settings) -> [N]`; `every` in environment
    steps; `start`, `factor` (1 where not named) and `limit` (none where not named) by the weight's
    name; `settings`: what else the function takes, by name."""

    function: str
    start: dict[str, float]
    factor: dict[str, float] = field(default_factory=dict)
    limit: dict[str, float] = field(default_factory=dict)
    every: int = 100_000
    settings: dict[str, float] = field(default_factory=dict)


class ScheduledWeights:
    """Weights follow from the step alone, so there is nothing to save."""

    frozen = False

    def __init__(self, config: Config) -> None:
        if unknown := ({*config.factor} | {*config.limit}) - {*config.start}:
            raise ConfigError(f"reward.start has no {min(unknown)}; it names the weights there are")
        if config.every < 1:
            raise ConfigError(f"reward.every={config.every} should be at least 1 step")
        self.config = config
        self.function: Callable[..., Tensor] = resolve(config.function)
        self.bumps = -1
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Take the weights of environment step `step`."""
        bumps = step // self.config.every
        if bumps == self.bumps:
            return
        self.bumps, limit, factor = bumps, self.config.limit, self.config.factor
        self.weights = {
            name: min(limit.get(name, float("inf")), value * factor.get(name, 1.0) ** bumps)
            for name, value in self.config.start.items()
        }
        self.metrics = {name: torch.tensor(value) for name, value in self.weights.items()}

    def __call__(self, rows: Tensors) -> Tensor:
        return self.function(rows, self.weights, **self.config.settings)

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Nothing to learn; the weights, for the log."""
        return self.metrics
