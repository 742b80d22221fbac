"""Observation and action normalisers (mean-std, min-max); part of a policy and saved with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class MeanStdNormalizer(nn.Module):
    """Normalises to zero mean and unit variance per element, clamped to +-`clip`; the identity
    until fitted. An element that hardly varies in the data keeps scale 1, so that its noise is not
    amplified.
    """

    mean: Tensor
    std: Tensor
    limit: Tensor

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        # No clipping before `fit`: raw observations can be large (HalfCheetah: 20 rad/s).
        self.register_buffer("limit", torch.tensor(math.inf))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def fit(self, values: Tensor) -> None:
        """Set mean and (population) standard deviation from `values` [N, size]."""
        values = values.float()
        std = values.std(0, correction=0)
        self.limit.fill_(self.clip)
        self.mean.copy_(values.mean(0))
        self.std.copy_(torch.where(std < 1e-4, torch.ones_like(std), std))

    def forward(self, values: Tensor) -> Tensor:
        return ((values - self.mean) / self.std).clamp(-self.limit, self.limit)


class MinMaxNormalizer(nn.Module):
    """Maps the data's range [minimum, maximum] to [-1, 1] and back; the identity until fitted.

    `identity`: stays the identity, for values that are normalised already.
    """

    middle: Tensor
    radius: Tensor

    def __init__(self, size: int, identity: bool = False) -> None:
        super().__init__()
        self.identity = identity
        self.register_buffer("middle", torch.zeros(size))
        self.register_buffer("radius", torch.ones(size))

    def fit(self, values: Tensor) -> None:
        """Set the range from `values` [N, size]; the scale of an element is at least 1e-2."""
        if self.identity:
            return
        low, high = values.float().amin(0), values.float().amax(0)
        self.middle.copy_((high + low) / 2)
        self.radius.copy_(((high - low) / 2).clamp(min=1e-2))

    def forward(self, values: Tensor) -> Tensor:
        return (values - self.middle) / self.radius

    def inverse(self, values: Tensor) -> Tensor:
        return values * self.radius + self.middle
