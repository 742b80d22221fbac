"""Gaussian: a tanh-squashed diagonal normal distribution (SAC; Haarnoja et al., 2018).

a = tanh(u), u ~ N(mean(o), std(o)^2);  log p(a) = log N(u) - sum log(1 - tanh(u)^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError
from embodied.core.nets import mlp
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from policies.encoders import Encoder, ImageConfig
from policies.random import Config as RandomConfig
from policies.random import Random

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Config:
    """`log_std`: bounds of log std, reached softly; `zero_head`: start with mean exactly 0."""

    chunk: int = 1
    hidden: tuple[int, ...] = (256, 256)
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"
    layer_norm: bool = False
    log_std: tuple[float, float] = (-5.0, 2.0)
    zero_head: bool = False
    images: ImageConfig = field(default_factory=ImageConfig)


class Gaussian(Policy):
    """Noise [n, chunk * A] is standard normal to explore, zero to act by the mean."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if spec.act.dtype != "float32":
            raise ConfigError("this policy needs continuous actions, not discrete ones")
        self.spec, self.chunk, self.config = spec, config.chunk, config
        self.size = config.chunk * spec.act.size
        self.encoder = Encoder(spec.obs, config.images)
        self.net = mlp(
            self.encoder.size,
            config.hidden,
            2 * self.size,
            config.activation,
            config.layer_norm,
        )
        if config.zero_head:
            head = self.net[-1]
            assert isinstance(head, torch.nn.Linear)
            torch.nn.init.zeros_(head.weight)
            torch.nn.init.zeros_(head.bias)

    def forward(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and log std, [n, size] each, before squashing."""
        mean, raw = self.net(self.encoder(obs)).chunk(2, 1)
        low, high = self.config.log_std
        return mean, low + (high - low) / 2 * (torch.tanh(raw) + 1)

    def draw(self, n: int, explore: bool = False) -> Tensor:
        device = self.encoder.norm.mean.device
        make = torch.randn if explore else torch.zeros
        return make(n, self.size, device=device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        mean, log_std = self(obs)
        action = torch.tanh(mean + log_std.exp() * noise)
        return action.view(-1, self.chunk, *self.spec.act.shape), carry

    def sample(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Action [n, size] and its log-probability [n], both differentiable."""
        mean, log_std = self(obs)
        u = mean + log_std.exp() * noise
        # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)), which does not underflow.
        squash = 2 * (math.log(2) - u - functional.softplus(-2 * u))
        log_prob = -(0.5 * noise.square() + log_std + 0.5 * LOG_2PI + squash).sum(1)
        return torch.tanh(u), log_prob

    def log_prob(self, obs: Tensors, action: Tensor) -> Tensor:
        """Log-probability [n] of given actions [n, size], drawn in from the rim by 1e-5."""
        mean, log_std = self(obs)
        u = torch.atanh(action.clamp(-1 + 1e-5, 1 - 1e-5))
        squash = 2 * (math.log(2) - u - functional.softplus(-2 * u))
        z = (u - mean) * torch.exp(-log_std)
        return -(0.5 * z.square() + log_std + 0.5 * LOG_2PI + squash).sum(1)

    def loss(self, batch: Tensors) -> Tensor:
        """Squared error of the mean action over the valid steps, [n]."""
        obs = {name: batch[f"obs/{name}"] for name in self.spec.obs}
        mean = torch.tanh(self(obs)[0]).view_as(batch["action"])
        error = (mean - batch["action"]).square().flatten(2).mean(2)
        return (error * batch["valid"]).sum(1) / batch["valid"].sum(1)

    def first(self) -> Policy:
        """Uniform actions."""
        return Random(RandomConfig(chunk=self.chunk), self.spec)

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
