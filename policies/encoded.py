"""EncodedPolicy: base class of policies that are a network on the features of an encoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embodied.core.bounds import Chunk, Units
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import mlp, orthogonal, own_network, per_row
from embodied.policies.networks.encoders import ImageConfig, PointConfig, make_encoder
from embodied.policies.random import Config as RandomConfig
from embodied.policies.random import Random


@dataclass(frozen=True)
class EncodedConfig:
    """Settings of an encoder and of the actions of a decision."""

    chunk: Chunk = 1  # actions of one decision
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds
    extractor: str | None = None  # class of an own Encoder in place of the usual one


@dataclass(frozen=True)
class MlpConfig(EncodedConfig):
    """Settings of an MLP on an encoder's features."""

    hidden: tuple[Units, ...] = (256, 256)  # units of each hidden layer
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"  # of the hidden layers
    layer_norm: bool = False  # layer normalisation in the hidden layers
    net: str | None = None  # own network in place of the MLP, given in Python


class EncodedPolicy(Policy):
    """Noise [n, size], the numbers of a chunk: standard normal to explore, zero for the mean."""

    config: Any

    def __init__(self, config: EncodedConfig, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.chunk = config.chunk
        self.config = config
        self.size = config.chunk * spec.act.size
        self.squashes = not spec.act.is_normalized
        self.encoder = make_encoder(spec, config)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.normal_noise(n, self.size, explore)

    def normal_noise(self, n: int, size: int, explore: bool) -> Tensor:
        """Noise [n, size]."""
        make = torch.randn if explore else torch.zeros
        return make(n, size, device=self.encoder.norm.mean.device)

    def in_steps(self, action: Tensor) -> Tensor:
        """Actions [n, size] as chunks [n, chunk, ...]."""
        return action.view(-1, self.chunk, *self.spec.act.shape)

    def uniform(self) -> Policy:
        """A policy with uniform actions."""
        return Random(RandomConfig(chunk=self.chunk), self.spec)

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)


class MlpPolicy(EncodedPolicy):
    """An EncodedPolicy whose `net` is an MLP with `out` outputs."""

    def __init__(self, config: MlpConfig, spec: Spec, out: int) -> None:
        super().__init__(config, spec)
        size, layers = self.encoder.size, (config.hidden, out, config.activation, config.layer_norm)
        self.net = own_network(config.net, size, out) if config.net else mlp(size, *layers)

    def begin_orthogonal(self, last: float) -> None:
        """Orthogonal weights, the gain of the last layer `last`; an own network begins as it is."""
        if self.config.net is None:
            orthogonal(self.net, last)

    def loss(self, batch: Tensors) -> Tensor:
        """Squared error of the output per action element, averaged over the valid steps, [n]."""
        error = (self(under(batch, "obs")).view_as(batch["action"]) - batch["action"]).square()
        return per_row(error, batch["valid"])

    def layers(self) -> nn.Sequential:
        """The layers of the MLP; ConfigError for what the user gave instead."""
        if self.config.net or self.config.extractor:
            raise ConfigError("it has a network of your own, and not an MLP's plain layers")
        return self.net


class DensityPolicy(MlpPolicy):
    """An MlpPolicy whose actions have a density."""

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (nats), [n] each, of stored actions [n, D], differentiable. D
        may be less than `size`, if only the first D elements were executed."""
        raise NotImplementedError

    def log_prob(self, obs: Tensors, action: Tensor) -> Tensor:
        """Log-probability [n] of stored actions [n, D], differentiable."""
        return self.evaluate_actions(obs, action)[0]


def build_with_chunk(node: Node, chunk: int | None, spec: Spec) -> Any:
    """Build the policy `node` with `chunk` actions in a decision (None: as the node says)."""
    return build({**node, **({} if chunk is None else {"chunk": chunk})}, Policy, spec=spec)


def require_continuous(spec: Spec) -> None:
    """Raise ConfigError if actions, or some of their elements, are choices."""
    if not spec.act.is_continuous:
        raise ConfigError(
            "this policy needs continuous actions, not choices: policy=categorical, with "
            "learner=ppo or learner=imitate"
        )
