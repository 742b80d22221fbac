"""MLPs, the residual-MLP denoiser and sinusoidal time embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.tensors import Tensors
from embodied.nn.normalizers import MeanStdNormalizer

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "mish": nn.Mish,
    "silu": nn.SiLU,
}


def mlp(
    size: int,
    hidden: Sequence[int],
    out: int,
    activation: str = "relu",
    layer_norm: bool = False,
) -> nn.Sequential:
    """An MLP: linear layers, each but the last followed by LayerNorm (optional) and an
    activation."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Linear(size, width))
        if layer_norm:
            layers.append(nn.LayerNorm(width))
        layers.append(ACTIVATIONS[activation]())
        size = width
    return nn.Sequential(*layers, nn.Linear(size, out))


def orthogonal(net: nn.Sequential, last: float) -> None:
    """Orthogonal initialisation, gain sqrt(2) in hidden layers and `last` in the last; zero
    biases."""
    layers: Sequence[nn.Linear] = [layer for layer in net if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last if layer is layers[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class Feedforward:
    """A policy as plain layers: tanh(net(norm(x))), x the concatenated `leaves`.

    `net` is a sequence of Linear, LayerNorm and classes of ACTIVATIONS that ends with a Linear. A
    policy of this form returns it from `feedforward()` and can be exported for use without torch.
    """

    leaves: tuple[str, ...]
    norm: MeanStdNormalizer
    net: nn.Sequential


def per_row(error: Tensor, valid: Tensor) -> Tensor:
    """Mean error [n] over the valid steps; `error` [n, H, ...], `valid` [n, H] (bool)."""
    error = error.flatten(2).mean(2)
    return (error * valid).sum(1) / valid.sum(1).clamp(min=1)


def sinusoid(t: Tensor, size: int) -> Tensor:
    """Sines and cosines [n, size] of times [n] in [0, 1], from 1/100 of a turn to 100 turns."""
    turns = torch.exp(torch.linspace(math.log(0.01), math.log(100.0), size // 2, device=t.device))
    angles = 2 * math.pi * t[:, None].float() * turns
    return torch.cat([angles.sin(), angles.cos()], 1)


class QFunction(nn.Module):
    """Base class of networks that score actions, with their own `encoder` of observations."""

    encoder: Any

    def each(self, obs: Tensors, actions: Tensor, members: Tensor | None = None) -> Tensor:
        """Q-values [E, N, K] of K actions [N, K, D] for each of N observations, by E networks."""
        raise NotImplementedError(f"{type(self).__name__} does not implement each")


class Denoiser(nn.Module):
    """A residual MLP from (noisy chunk [n, D], time [n] in [0, 1], features [n, F]) to [n, D].

    Used by diffusion and flow policies, which define the meaning of the output.
    """

    def __init__(self, size: int, features: int, width: int, depth: int, time_dim: int) -> None:
        super().__init__()
        if time_dim < 2 or time_dim % 2:
            raise ValueError(f"time_dim={time_dim} must be even: half sines, half cosines")
        self.time_dim = time_dim
        self.time = nn.Sequential(
            nn.Linear(time_dim, 2 * time_dim), nn.Mish(), nn.Linear(2 * time_dim, time_dim)
        )
        self.enter = nn.Linear(size + time_dim + features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, size)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        return self.at(x, self.embed(t), features)

    def embed(self, t: Tensor) -> Tensor:
        """Time embeddings [n, time_dim] of times [n]; samplers compute all steps' at once."""
        return self.time(sinusoid(t, self.time_dim))

    def at(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """`forward` with embedded times: [time_dim] for all samples, or [n, time_dim]."""
        h = self.enter(torch.cat([x, time.expand(x.shape[0], -1), features], 1))
        for block in self.blocks:
            h = block(h)
        return self.leave(nn.functional.mish(h))


class Block(nn.Module):
    """h + W2 mish(W1 mish(h))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.two(nn.functional.mish(self.one(nn.functional.mish(h))))
