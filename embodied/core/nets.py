"""Small networks that several methods share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
    """Linear layers with an activation (after LayerNorm, if asked) between them; last one linear."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Linear(size, width))
        if layer_norm:
            layers.append(nn.LayerNorm(width))
        layers.append(ACTIVATIONS[activation]())
        size = width
    return nn.Sequential(*layers, nn.Linear(size, out))


def sinusoid(t: Tensor, size: int) -> Tensor:
    """Sinusoidal features [n, size] of times [n] in [0, 1], periods from 1/1000 to 10."""
    rates = torch.exp(torch.linspace(math.log(0.1), math.log(1000.0), size // 2, device=t.device))
    angles = 2 * math.pi * t[:, None].float() * rates / 10
    return torch.cat([angles.sin(), angles.cos()], 1)


class Denoiser(nn.Module):
    """A residual MLP from (noisy chunk [n, D], time [n] in [0, 1], features [n, F]) to [n, D].

    Diffusion and flow policies share it; what its output means is theirs to say.
    """

    def __init__(self, size: int, features: int, width: int, depth: int, time_dim: int) -> None:
        super().__init__()
        self.time_dim = time_dim
        self.time = nn.Sequential(
            nn.Linear(time_dim, 2 * time_dim), nn.Mish(), nn.Linear(2 * time_dim, time_dim)
        )
        self.enter = nn.Linear(size + time_dim + features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, size)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        time = self.time(sinusoid(t, self.time_dim))
        h = self.enter(torch.cat([x, time, features], 1))
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
