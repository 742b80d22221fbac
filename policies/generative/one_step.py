"""OneStep: a one-step policy distilled from a flow policy; the actor of FQL (Park et al., 2025).

Flow Q-learning adds a Q term to this imitation loss:

    L = L_flow(v) + |mu(o, z) - sg ODE_v(o, z)|^2,   z ~ N(0, I)

The policy acts with `mu`. The flow is part of the module because learners need it; acting never
evaluates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor

from embodied.core.bounds import Chunk, Units
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import mlp, per_row
from embodied.policies.encoded import build_with_chunk, require_continuous
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a one-step policy and its network."""

    flow: Node  # node of the policy to distil, whose noise has the size of its chunk
    chunk: Chunk | None = None  # actions of one decision (null: the flow's)
    hidden: tuple[Units, ...] = (256, 256, 256)  # units of each hidden layer
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "gelu"  # of the hidden layers
    layer_norm: bool = False  # layer normalisation in the hidden layers
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds


class OneStep(PolicyWrapper):
    """One-step policy. Noise [n, chunk * A] is standard normal."""

    flow: Policy

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        require_continuous(spec)
        self.flow = build_with_chunk(config.flow, config.chunk, spec)
        self.spec = spec
        self.chunk = self.flow.chunk
        self.size = self.chunk * spec.act.size
        if self.flow.sample_noise(1).shape[1:] != (self.size,):
            raise ConfigError("flow must be a policy whose noise is as large as its chunk")
        if self.flow.initial(1):
            raise ConfigError("a one-step policy observes the present only: flow.obs_steps=1")
        self.encoder = Encoder(spec.obs, config.images, points=config.points)
        self.net = mlp(
            self.encoder.size + self.size,
            config.hidden,
            self.size,
            config.activation,
            config.layer_norm,
        )
        self.fresh = True

    @classmethod
    def build_around(cls, base: Policy, node: Mapping[str, Any]) -> Self:
        """Build `node` with a trained flow policy `base`, which keeps its normalisers."""
        policy = build({**node, "flow": base.node, "chunk": None}, cls, spec=base.spec)
        policy.flow.load_state_dict(base.state_dict())
        policy.fresh = False
        return policy

    def forward(self, obs: Tensors, noise: Tensor) -> Tensor:
        """Return mu(o, z) [n, size], not clipped to [-1, 1]; differentiable."""
        return self.net(torch.cat([self.encoder(obs), noise], 1))

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.size, device=self.encoder.norm.mean.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        actions = self.spec.act.bounded(self(obs, noise))
        return actions.view(-1, self.chunk, *self.spec.act.shape), carry

    @torch.no_grad()
    def teacher(self, obs: Tensors, noise: Tensor) -> Tensor:
        """The flow's chunks [n, size] for the same noise."""
        return self.flow.act(obs, {}, noise)[0].flatten(1)

    def loss(self, batch: Tensors) -> Tensor:
        """The flow's own loss plus the squared distance to its chunks at new noise, [n]."""
        obs = under(batch, "obs")
        noise = self.sample_noise(len(batch["action"]))
        error = (self(obs, noise) - self.teacher(obs, noise)).square()
        distil = per_row(error.view_as(batch["action"]), batch["valid"])
        return self.flow.loss(batch) + distil

    def fit(self, rows: Tensors) -> None:
        """Set the normalisers; a pretrained flow keeps its own."""
        if self.fresh:
            self.flow.fit(rows)
        self.encoder.fit(rows)
