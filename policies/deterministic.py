"""Deterministic: a network is the action, noise around it explores (TD3; Fujimoto et al., 2018).

a = clip(mu(o) + std e, -1, 1),  mu = tanh(net(o)),  e ~ N(0, 1) to explore and 0 to act.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.nets import Feedforward, mlp, per_row
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from policies.encoders import Encoder, ImageConfig
from policies.points import PointConfig
from policies.random import Config as RandomConfig
from policies.random import Random


@dataclass(frozen=True)
class Config:
    """`std`: deviation of the noise that explores, in units of half the action range; `warmup`:
    who acts before learning starts, uniform actions or the untrained policy with its noise."""

    chunk: int = 1
    hidden: tuple[int, ...] = (256, 256)
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"
    layer_norm: bool = False
    std: float = 0.1
    warmup: Literal["self", "uniform"] = "uniform"
    images: ImageConfig = field(default_factory=ImageConfig)
    points: PointConfig = field(default_factory=PointConfig)


class Deterministic(Policy):
    """Noise [n, chunk * A] is standard normal to explore, zero to act."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if spec.act.dtype != "float32":
            raise ConfigError("this policy needs continuous actions, not discrete ones")
        self.spec, self.chunk, self.config = spec, config.chunk, config
        self.size = config.chunk * spec.act.size
        self.encoder = Encoder(spec.obs, config.images, points=config.points)
        self.net = mlp(
            self.encoder.size, config.hidden, self.size, config.activation, config.layer_norm
        )

    def forward(self, obs: Tensors) -> Tensor:
        """The action [n, size] without noise; differentiable."""
        return torch.tanh(self.net(self.encoder(obs)))

    def draw(self, n: int, explore: bool = False) -> Tensor:
        device = self.encoder.norm.mean.device
        make = torch.randn if explore else torch.zeros
        return make(n, self.size, device=device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        action = torch.add(self(obs), noise, alpha=self.config.std).clamp(-1, 1)
        return action.view(-1, self.chunk, *self.spec.act.shape), carry

    def feedforward(self) -> Feedforward:
        """The action without noise as plain layers; ConfigError where it sees more than vectors."""
        return Feedforward(self.encoder.only_vectors(), self.encoder.norm, self.net)

    def loss(self, batch: Tensors) -> Tensor:
        """Squared error per action element, averaged over the valid steps, [n]."""
        error = (self(under(batch, "obs")).view_as(batch["action"]) - batch["action"]).square()
        return per_row(error, batch["valid"])

    def first(self) -> Policy:
        """Uniform actions, or itself (`warmup`)."""
        if self.config.warmup == "self":
            return self
        return Random(RandomConfig(chunk=self.chunk), self.spec)

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
