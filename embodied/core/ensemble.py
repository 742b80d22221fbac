"""Ensemble: E networks of one shape as batched matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class Ensemble(nn.Module):
    """E multi-layer perceptrons: [N, size] or [E, N, size] to [E, N, out].

    Weights are [E, in, out], initialised as torch's Linear is; `layer_norm` normalises every
    hidden layer before its ReLU, which bounds the Q-values of unseen actions (Ball et al., 2023).
    """

    def __init__(
        self, n: int, size: int, hidden: Sequence[int], out: int = 1, layer_norm: bool = False
    ) -> None:
        super().__init__()
        self.n, self.layer_norm = n, layer_norm
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

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            x = x.expand(self.n, *x.shape)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = affine(x, weight, bias)
            if i < last:
                if self.layer_norm:
                    x = functional.layer_norm(x, x.shape[-1:])
                    x = torch.addcmul(self.shifts[i], x, self.scales[i])
                x = torch.relu_(x)
        return x


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W + b per network: [E, N, in], [E, in, out], [E, 1, out] to [E, N, out]."""
    if weight.shape[2] == 1:
        # Batched matrix products are slow where a side is one wide: six times, on a CPU.
        return (x * weight.mT).sum(2, keepdim=True) + bias
    return torch.baddbmm(bias, x, weight)
