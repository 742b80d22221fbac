"""Value: what an observation is worth, from observations that the policy may not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each
from embodied.nn.networks import mlp, orthogonal
from policies.networks.encoders import Encoder
from policies.recurrent import Memory


@dataclass(frozen=True)
class ValueConfig:
    """`obs`: the observations that it sees (None: all, `critic/*` and `privileged/*` too);
    `head`: gain of the last layer."""

    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "tanh"
    layer_norm: bool = False
    head: float = 1.0
    obs: tuple[str, ...] | None = None


class Value(nn.Module):
    """An encoder and a network; V [N] of observations."""

    encoder: Encoder

    def __init__(self, config: ValueConfig, spec: Spec) -> None:
        super().__init__()
        self.encoder = eyes(config, spec)
        self.net = mlp(self.encoder.size, config.hidden, 1, config.activation, config.layer_norm)
        orthogonal(self.net, config.head)

    def forward(self, obs: Tensors) -> Tensor:
        return self.net(self.encoder(obs)).squeeze(1)


class RecurrentValue(nn.Module):
    """A memory of its own and a network; V [T, B] along rows of time."""

    def __init__(self, config: ValueConfig, spec: Spec, width: int) -> None:
        super().__init__()
        self.memory = Memory(eyes(config, spec), width)
        self.net = mlp(width, config.hidden, 1, config.activation, config.layer_norm)
        orthogonal(self.net, config.head)

    @property
    def encoder(self) -> Encoder:
        return self.memory.encoder

    def forward(self, obs: Tensors, h: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Values [T, B] and the memories [T, B, width] they come from; `h` [B, width] before."""
        memory = self.memory.along(obs, h, first)
        return self.net(memory.flatten(0, 1)).view(first.shape), memory

    def after(self, obs: Tensors, memory: Tensor) -> Tensor:
        """Values [T, B] of observations [T, B, ...] that each follow a memory [T, B, width]."""
        flat = each(obs, lambda value: value.flatten(0, 1))
        return self.net(self.memory(flat, memory.flatten(0, 1))).view(memory.shape[:2])


def eyes(config: ValueConfig, spec: Spec) -> Encoder:
    """An encoder of what a critic sees; a name that the world does not have is a ConfigError."""
    names = spec.obs if config.obs is None else config.obs
    for name in names:
        if name not in spec.obs:
            raise ConfigError(
                f'value.obs: there is no observation "{name}"{nearest(name, spec.obs)}'
            )
    return Encoder({name: spec.obs[name] for name in names}, asymmetric=True)
