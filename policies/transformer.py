"""Transformer: a causal transformer over the past, with an inner policy on its output.

The carry holds keys and values of the last `window` steps (embodied.policies.networks.sequence), so
that a decision costs one step of attention. The output is the observation `memory` of the inner
policy, as in embodied.policies.recurrent, and the same learners train it. Keys that were cached
before a batch are constants in it, as the first hidden state of a recurrent policy is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from embodied.core.bounds import Count
from embodied.core.build import Node
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each
from embodied.policies.networks.encoders import Encoder, ImageConfig
from embodied.policies.networks.pointnet import PointConfig
from embodied.policies.networks.sequence import CausalTransformer
from embodied.policies.recurrent import build_inner, evaluate_inner


@dataclass(frozen=True)
class Config:
    """Settings of a policy with a transformer over time."""

    inner: Node  # node of the policy on the transformer's output, built with this `chunk`
    chunk: Count = 1  # actions of one decision
    width: Count = 64  # units of a step
    heads: Count = 4  # attention heads of a layer
    layers: Count = 2  # layers
    window: Count = 64  # steps that a step sees, itself included
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds


class Transformer(Policy):
    """Policy with a causal transformer. Noise is that of the inner policy."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.chunk = config.chunk
        self.width = config.width
        self.encoder = Encoder(spec.obs, config.images, points=config.points)
        self.enter = nn.Linear(self.encoder.size, config.width)
        self.past = CausalTransformer(config.width, config.heads, config.layers, config.window)
        self.inner = build_inner(config.inner, config.chunk, config.width, spec)

    def initial(self, n: int) -> Tensors:
        return {**self.past.empty(n), **self.inner.initial(n)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.inner.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        memory, cache = self.past.step(self.enter(self.encoder(obs)), carry)
        actions, kept = self.inner.act({"memory": memory}, {}, noise)
        return actions, {**cache, **kept}

    def evaluate_sequence(
        self, obs: Tensors, action: Tensor, carry: Tensors, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [T, B] of sequences of actions [T, B, ...], from the `carry`
        [B, ...] before the first action."""
        flat = each(obs, lambda leaf: leaf.transpose(0, 1).flatten(0, 1))
        inputs = self.enter(self.encoder(flat)).view(*first.mT.shape, self.width)
        memory, _ = self.past(inputs, carry, first.mT)
        return evaluate_inner(self.inner, memory.transpose(0, 1), action)

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
