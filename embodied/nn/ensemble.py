"""Ensemble: E MLPs of the same shape, computed as batched matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.nn.networks import ACTIVATIONS


class Ensemble(nn.Module):
    """E MLPs: [N, size] or [E, N, size] to [E, N, out].

    Weights are [E, in, out], initialised as in torch's Linear. `layer_norm` normalises every hidden
    layer before its activation, which keeps Q-values of out-of-distribution actions bounded (Ball
    et al., 2023).
    """

    def __init__(
        self,
        n: int,
        size: int,
        hidden: Sequence[int],
        out: int = 1,
        layer_norm: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.n = n
        self.layer_norm = layer_norm
        self.activation = activation
        self.activate = ACTIVATIONS[activation]()
        sizes = [size, *hidden, out]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterList()
        for i, o in pairwise(sizes):
            bound = 1 / math.sqrt(i)
            self.weights.append(torch.empty(n, i, o).uniform_(-bound, bound))
            self.biases.append(torch.empty(n, 1, o).uniform_(-bound, bound))
        if layer_norm:
            for width in hidden:
                self.scales.append(torch.ones(n, 1, width))
                self.shifts.append(torch.zeros(n, 1, width))

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:
        """Outputs of all members, or of the first `first` ones (then E = `first`)."""
        if x.ndim == 2:
            x = x.unsqueeze(0).expand(first or self.n, -1, -1)
        parts = (self.weights, self.biases, self.scales, self.shifts)
        weights, biases, scales, shifts = (members(part, first) for part in parts)
        last = len(weights) - 1
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = affine(x, weight, bias)
            if i < last:
                if self.layer_norm:
                    x = functional.layer_norm(x, x.shape[-1:])
                    x = torch.addcmul(shifts[i], x, scales[i])
                x = torch.relu_(x) if self.activation == "relu" else self.activate(x)
        return x


def members(part: nn.ParameterList, first: int | None) -> list[Tensor]:
    """The parameters of the first `first` members (None: all). By index: PyTorch 2.11 cannot
    compile `[*part]`."""
    return [part[i] if first is None else part[i][:first] for i in range(len(part))]


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W + b per network: [E, N, in], [E, in, out], [E, 1, out] to [E, N, out]."""
    if weight.shape[2] == 1:
        # With one output, batched matrix products are six times slower on a CPU.
        # Not mT: it cannot be exported.
        return (x * weight.transpose(1, 2)).sum(2, keepdim=True) + bias
    return torch.baddbmm(bias, x, weight)
