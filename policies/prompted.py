"""Prompted: a policy of every reward, which a vector z tells what to maximise (RL Zero, 2024).

    a = clip(tanh(net(o, z)) + std e, -1, 1),   z = sqrt(d) u / |u|

B(s) in R^d, of norm sqrt(d), is what `learner=fb` knows of states (forward-backward representation;
Touati and Ollivier, 2021). The policy that maximises a reward r has u = E B(s) r(s), the one that
goes to a state g has u = B(g), and the one whose states are distributed as those of a demonstration
has the mean of their B. u is a part of the saved policy: `embodied prompt` sets it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, NonNegative, Units
from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import mlp
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.policies.encoded import EncodedConfig, EncodedPolicy, require_continuous
from embodied.policies.networks.encoders import Encoder


@dataclass(frozen=True)
class Config(EncodedConfig):
    """Settings of a policy of every reward; std in units of half the action range."""

    hidden: tuple[Units, ...] = (256, 256)  # units of the hidden layers
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"  # of the hidden layers
    layer_norm: bool = False  # layer normalisation in the hidden layers
    dimension: Units = 50  # d, numbers of a prompt
    backward: tuple[Count, ...] = (256, 256)  # units of the hidden layers of B
    elements: tuple[str, ...] | None = None  # elements of the observations that B sees; null: all
    std: NonNegative = 0.2  # std of the exploration noise


class Backward(nn.Module):
    """B(s) [n, d] of observations [n, ...], of norm sqrt(d); sees elements of vectors only."""

    places: Tensor

    def __init__(
        self, encoder: Encoder, spec: Spec, elements: Sequence[str] | None, config: Config
    ) -> None:
        super().__init__()
        names = [name for leaf in encoder.vectors for name in element_names(spec, leaf)]
        for name in elements or ():
            if name not in names:
                raise ConfigError(f'policy.elements: no element "{name}"{nearest(name, names)}')
        if not names:
            raise ConfigError("this policy needs an observation that is a vector of numbers")
        self.flat = encoder.flat
        chosen = names if elements is None else elements
        places = torch.tensor([names.index(name) for name in chosen])
        self.register_buffer("places", places, persistent=False)
        self.norm = MeanStdNormalizer(len(chosen))
        self.net = mlp(len(chosen), config.backward, config.dimension)
        self.length = math.sqrt(config.dimension)

    def forward(self, obs: Tensors) -> Tensor:
        seen = self.norm(self.flat(obs)[:, self.places])
        return self.length * functional.normalize(self.net(seen), dim=1)

    def fit(self, rows: Tensors) -> None:
        """Set the normaliser from data with `obs/*` [N, ...]."""
        obs = {key.removeprefix("obs/"): value for key, value in rows.items()}
        values = self.flat(obs)
        self.norm.fit(values[:, self.places.to(values.device)])


class Prompted(EncodedPolicy):
    """Noise [n, size] is standard normal to explore, otherwise zero."""

    config: Config
    u: Tensor  # [d]: the prompt

    def __init__(self, config: Config, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec)
        self.dimension = config.dimension
        width = self.encoder.size + config.dimension
        layers = config.hidden, self.size, config.activation, config.layer_norm
        self.net = mlp(width, *layers)
        self.backward = Backward(self.encoder, spec, config.elements, config)
        self.register_buffer("u", torch.zeros(config.dimension))

    def forward(self, obs: Tensors, z: Tensor) -> Tensor:
        """The actions [n, size] without noise for prompts z [n, d] of norm sqrt(d)."""
        raw = self.net(torch.cat([self.encoder(obs), z], 1))
        return torch.tanh(raw) if self.squashes else raw

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        z = math.sqrt(self.dimension) * functional.normalize(self.u, dim=0)
        action = self(obs, z.expand(noise.shape[0], -1)) + self.config.std * noise
        return self.in_steps(self.spec.act.bounded(action)), carry

    def embed(self, obs: Tensors) -> Tensor:
        """B(s) [n, d] of observations [n, ...]."""
        return self.backward(obs)

    def prompt(self, u: Tensor) -> None:
        """Set u [d]; its length does not matter."""
        self.u.copy_(u)

    def fit(self, rows: Tensors) -> None:
        super().fit(rows)
        self.backward.fit(rows)


def element_names(spec: Spec, name: str) -> Sequence[str]:
    """The names of the elements of an observation; NAME[k] where they have none."""
    leaf = spec.obs[name]
    return leaf.names or tuple(f"{name}[{k}]" for k in range(leaf.size))
