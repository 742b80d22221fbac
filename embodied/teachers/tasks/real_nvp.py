"""RealNVP: a conditional normalizing flow onto the unit cube, the goal generator of Setter-Solver.

Dinh, Sohl-Dickstein and Bengio, "Density estimation using Real NVP", 2017. Each affine coupling
keeps part of the elements and maps the others by x -> x s + t, s = 0.01 + softplus(a). A network
computes (a, t) from the kept part and the condition f. The last layer is a sigmoid.

    log p(g | f) = log N(z) - log |dg / dz|
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.teachers.torch_teacher import linear

EDGE = 1e-4  # goals are clamped to [EDGE, 1 - EDGE] before the logit
UNIT = math.log(math.e - 1)  # softplus of it is 1


class Highway(nn.Module):
    """Highway layer: h -> g relu(A h) + (1 - g) h, g = sigmoid(B h)."""

    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__()
        self.change = linear(width, width, random)
        self.gate = linear(width, width, random)

    def forward(self, h: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(h))
        return gate * F.relu(self.change(h)) + (1 - gate) * h


class Coupling(nn.Module):
    """Affine coupling layer; elements with `kept` [d] (bool) true are unchanged. Initially close to
    the identity."""

    kept: Tensor

    def __init__(self, kept: Tensor, width: int, layers: int, random: np.random.Generator) -> None:
        super().__init__()
        self.register_buffer("kept", kept.float(), persistent=False)
        highways = [Highway(width, random) for _ in range(layers)]
        last = linear(width, 2 * len(kept), random, scale=0.1)
        self.net = nn.Sequential(linear(len(kept) + 1, width, random), nn.ReLU(), *highways, last)

    def parts(self, kept: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift [n, d]; 1 and 0 for kept elements."""
        raw, shift = self.net(torch.cat([kept, condition], 1)).chunk(2, 1)
        moved = 1 - self.kept
        scale = 0.01 + F.softplus(raw + UNIT)
        return scale * moved + self.kept, shift * moved

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.parts(x * self.kept, condition)
        return x * scale + shift, scale.log().sum(1)

    def inverse(self, y: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Input x [n, d] for output y [n, d], and the log-determinant [n] of `forward` at x."""
        scale, shift = self.parts(y * self.kept, condition)
        return (y - shift) / scale, scale.log().sum(1)


class Flow(nn.Module):
    """Maps normal noise z and a feasibility to goals. Each of `blocks` has three couplings, which
    keep the first half of the elements, the second half, and every other element."""

    def __init__(
        self, d: int, blocks: int, width: int, layers: int, random: np.random.Generator
    ) -> None:
        super().__init__()
        place = torch.arange(d)
        left, odd = place < d // 2, place % 2 == 1
        masks = [left, ~left, odd] if d > 1 else [left] * 3
        couplings = [Coupling(mask, width, layers, random) for mask in masks * blocks]
        self.couplings = couplings
        self.parts = nn.ModuleList(couplings)

    def forward(self, z: Tensor, feasibility: Tensor) -> tuple[Tensor, Tensor]:
        """Goals [n, d] in (0, 1) and log p(goal | feasibility) [n]; z [n, d], feasibility [n]."""
        condition = feasibility[:, None] * 2 - 1
        x, log = z, normal(z)
        for coupling in self.couplings:
            x, volume = coupling(x, condition)
            log = log - volume
        return torch.sigmoid(x), log - squeezed(x)

    def inverse(self, goals: Tensor, feasibility: Tensor) -> tuple[Tensor, Tensor]:
        """Noise z [n, d] that is mapped to `goals` [n, d], and log p(goals | feasibility) [n]."""
        condition = feasibility[:, None] * 2 - 1
        x = torch.logit(goals.clamp(EDGE, 1 - EDGE))
        log = -squeezed(x)
        for coupling in reversed(self.couplings):
            x, volume = coupling.inverse(x, condition)
            log = log - volume
        return x, log + normal(x)


def normal(z: Tensor) -> Tensor:
    """Log-density [n] of the standard normal distribution at z [n, d]."""
    return -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)


def squeezed(x: Tensor) -> Tensor:
    """Log-determinant [n] of the sigmoid's Jacobian at x [n, d]."""
    return (F.logsigmoid(x) + F.logsigmoid(-x)).sum(1)
