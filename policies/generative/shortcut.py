"""Shortcut: a flow policy conditioned on its step size; works with many steps and with one.

Frans et al. (2024). The network s(x_t, t, d, o) is the mean velocity over the next d of time. At
the smallest step d = 1 / finest it is trained as flow matching, s = x_1 - x_0. One row in
`bootstrap` teaches it a longer step by two of half the length, with the gradient stopped:

    s(x_t, t, d) = (s(x_t, t, d/2) + s(x', t + d/2, d/2)) / 2,   x' = x_t + d/2 s(x_t, t, d/2),

for d = 1, 1/2 .. 2/finest and t on d's own grid. Acting takes K = `steps` Euler steps with d = 1/K.
Targets are of the trained network itself, as in ReinFlow (Zhang et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import per_row
from policies.generative import flow


@dataclass(frozen=True)
class Config(flow.Config):
    """`steps` to act: a power of two up to `finest`, the number of steps of plain flow matching;
    `bootstrap`: one row of a batch in so many teaches longer steps."""

    steps: int = 1
    finest: int = 16
    bootstrap: int = 4


class Shortcut(flow.Flow):
    """Noise [n, chunk * A] is where the integration starts."""

    def __init__(self, config: Config, spec: Spec) -> None:
        for name, count in (("steps", config.steps), ("finest", config.finest)):
            if count < 1 or count & (count - 1):
                raise ConfigError(f"{name}={count} must be a power of two: 1, 2, 4, ...")
        if not config.steps <= config.finest or config.finest < 2 or config.bootstrap < 2:
            raise ConfigError(
                f"steps={config.steps} must be at most finest={config.finest}, which is at least "
                f"2, as is bootstrap={config.bootstrap}"
            )
        super().__init__(config, spec)
        self.config = config
        self.finest_level = config.finest.bit_length() - 1
        # One vector for each step size 2^-level, added to the features of time.
        self.sizes = nn.Embedding(self.finest_level + 1, self.net.time_dim)
        nn.init.normal_(self.sizes.weight, std=0.3)

    def embedded(self) -> Tensor:
        return super().embedded() + self.sizes.weight[self.steps.bit_length() - 1]

    def velocity(self, x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """s [n, D] at times [n] for steps of 2^-level [n] (int64)."""
        return self.net.at(x, self.net.embed(t) + self.sizes(level), features)

    def loss(self, batch: Tensors) -> Tensor:
        """Squared error of the velocity over the valid steps, [n]."""
        features = self.encoder(under(batch, "obs"))
        target = self.range(batch["action"]).flatten(1)
        x0, t = torch.randn_like(target), torch.rand(len(target), device=target.device)
        level = torch.full_like(t, self.finest_level, dtype=torch.int64)
        # Every so many rows, not the first ones: a batch may be put together of several sources.
        some = slice(self.config.bootstrap - 1, None, self.config.bootstrap)
        level[some] = torch.randint(self.finest_level, (len(t[some]),), device=t.device)
        scale = torch.exp2(level[some])
        t[some] = (t[some] * scale).floor() / scale
        x = torch.lerp(x0, target, t[:, None])
        goal = target - x0
        goal[some] = self.longer(x[some], t[some], level[some], features[some])
        error = (self.velocity(x, t, level, features) - goal).square()
        return per_row(error.view_as(batch["action"]), batch["valid"])

    @torch.no_grad()
    def longer(self, x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """What a step of 2^-level should be: the mean of two of half its length."""
        half = torch.exp2(-(level + 1).float())
        one = self.velocity(x, t, level + 1, features)
        two = self.velocity(x + half[:, None] * one, t + half, level + 1, features)
        return (one + two) / 2
