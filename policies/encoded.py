"""EncodedPolicy: base class of policies that are a network on the features of an encoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import mlp, orthogonal, own_network
from embodied.policies.networks.encoders import ImageConfig, PointConfig, make_encoder
from embodied.policies.random import Config as RandomConfig
from embodied.policies.random import Random


@dataclass(frozen=True)
class EncodedConfig:
 own network in place of the MLP, given in Python (docs/python.md)  """Settings of an encoder and of the actions of a decision."""

 own network in place of the MLP, given in Python (docs/python.md)  chunk: Count = 1  # actions of one decision
 own network in place of the MLP, given in Python (docs/python.md)  images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
 own network in place of the MLP, given in Python (docs/python.md)  points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds
 own network in place of the MLP, given in Python (docs/python.md)  extractor: str | None = None  # class of an own Encoder in place of the usual one


@dataclass(frozen=True)
class MlpConfig(EncodedConfig):
 own network in place of the MLP, given in Python (docs/python.md)  """Settings of an MLP on an encoder's features."""

 own network in place of the MLP, given in Python (docs/python.md)  hidden: tuple[Count, ...] = (256, 256)  # units of each hidden layer
 own network in place of the MLP, given in Python (docs/python.md)  activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"  # of the hidden layers
 own network in place of the MLP, given in Python (docs/python.md)  layer_norm: bool = False  # layer normalisation in the hidden layers
 own network in place of the MLP, given in Python (docs/python.md)  net: str | None = None  # own network in place of the MLP, given in Python (docs/python.md)


class EncodedPolicy(Policy):
 own network in place of the MLP, given in Python (docs/python.md)  """Encodes observations; `size`: the numbers of a chunk. Noise [n, size] is standard normal to
 own network in place of the MLP, given in Python (docs/python.md)  explore, zero for the mean action."""

 own network in place of the MLP, given in Python (docs/python.md)  config: Any

 own network in place of the MLP, given in Python (docs/python.md)  def __init__(self, config: EncodedConfig, spec: Spec) -> None:
 own network in place of the MLP, given in Python (docs/python.md)      super().__init__()
 own network in place of the MLP, given in Python (docs/python.md)      self.spec = spec
 own network in place of the MLP, given in Python (docs/python.md)      self.chunk = config.chunk
 own network in place of the MLP, given in Python (docs/python.md)      self.config = config
 own network in place of the MLP, given in Python (docs/python.md)      self.size = config.chunk * spec.act.size
 own network in place of the MLP, given in Python (docs/python.md)      self.squashes = not spec.act.is_normalized
 own network in place of the MLP, given in Python (docs/python.md)      self.encoder = make_encoder(spec, config)

 own network in place of the MLP, given in Python (docs/python.md)  def sample_noise(self, n: int, explore: bool = False) -> Tensor:
 own network in place of the MLP, given in Python (docs/python.md)      return self.normal_noise(n, self.size, explore)

 own network in place of the MLP, given in Python (docs/python.md)  def normal_noise(self, n: int, size: int, explore: bool) -> Tensor:
 own network in place of the MLP, given in Python (docs/python.md)      """Noise [n, size]."""
 own network in place of the MLP, given in Python (docs/python.md)      make = torch.randn if explore else torch.zeros
 own network in place of the MLP, given in Python (docs/python.md)      return make(n, size, device=self.encoder.norm.mean.device)

 own network in place of the MLP, given in Python (docs/python.md)  def in_steps(self, action: Tensor) -> Tensor:
 own network in place of the MLP, given in Python (docs/python.md)      """Actions [n, size] as chunks [n, chunk, ...]."""
 own network in place of the MLP, given in Python (docs/python.md)      return action.view(-1, self.chunk, *self.spec.act.shape)

 own network in place of the MLP, given in Python (docs/python.md)  def uniform(self) -> Policy:
 own network in place of the MLP, given in Python (docs/python.md)      """A policy with uniform actions."""
 own network in place of the MLP, given in Python (docs/python.md)      return Random(RandomConfig(chunk=self.chunk), self.spec)

 own network in place of the MLP, given in Python (docs/python.md)  def fit(self, rows: Tensors) -> None:
 own network in place of the MLP, given in Python (docs/python.md)      self.encoder.fit(rows)


class MlpPolicy(EncodedPolicy):
 own network in place of the MLP, given in Python (docs/python.md)  """An EncodedPolicy whose `net` is an MLP with `out` outputs."""

 own network in place of the MLP, given in Python (docs/python.md)  def __init__(self, config: MlpConfig, spec: Spec, out: int) -> None:
 own network in place of the MLP, given in Python (docs/python.md)      super().__init__(config, spec)
 own network in place of the MLP, given in Python (docs/python.md)      size, layers = self.encoder.size, (config.hidden, out, config.activation, config.layer_norm)
 own network in place of the MLP, given in Python (docs/python.md)      self.net = own_network(config.net, size, out) if config.net else mlp(size, *layers)

 own network in place of the MLP, given in Python (docs/python.md)  def begin_orthogonal(self, last: float) -> None:
 own network in place of the MLP, given in Python (docs/python.md)      """Orthogonal weights, the gain of the last layer `last`; an own network begins as it is."""
 own network in place of the MLP, given in Python (docs/python.md)      if self.config.net is None:
 own network in place of the MLP, given in Python (docs/python.md)          orthogonal(self.net, last)

 own network in place of the MLP, given in Python (docs/python.md)  def layers(self) -> nn.Sequential:
 own network in place of the MLP, given in Python (docs/python.md)      """The layers of the MLP; ConfigError for what the user gave instead."""
 own network in place of the MLP, given in Python (docs/python.md)      if self.config.net or self.config.extractor:
 own network in place of the MLP, given in Python (docs/python.md)          raise ConfigError("it has a network of your own, and not an MLP's plain layers")
 own network in place of the MLP, given in Python (docs/python.md)      return self.net


def require_continuous(spec: Spec) -> None:
 own network in place of the MLP, given in Python (docs/python.md)  """Raise ConfigError if actions, or some of their elements, are choices."""
 own network in place of the MLP, given in Python (docs/python.md)  if not spec.act.is_continuous:
 own network in place of the MLP, given in Python (docs/python.md)      raise ConfigError(
 own network in place of the MLP, given in Python (docs/python.md)          "this policy needs continuous actions, not choices: policy=categorical, with "
 own network in place of the MLP, given in Python (docs/python.md)          "learner=ppo or learner=imitate"
 own network in place of the MLP, given in Python (docs/python.md)      )
