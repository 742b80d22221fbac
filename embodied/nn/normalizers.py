"""Observation and action normalisers, part of a policy and saved with it; running moments."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embodied.core.tensors import each


class MeanStdNormalizer(nn.Module):
    """Normalises to zero mean and unit variance per element, clamped to +-`clip`; the identity
    until fitted. An element that hardly varies in the data keeps scale 1, so that its noise is not
    amplified. `kept`: `fit` leaves it as it is.
    """

    kept = False
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
        if self.kept:
            return
        values = values.float()
        std = values.std(0, correction=0)
        self.limit.fill_(self.clip)
        self.mean.copy_(values.mean(0))
        self.std.copy_(torch.where(std < 1e-4, torch.ones_like(std), std))

    def forward(self, values: Tensor) -> Tensor:
        return ((values - self.mean) / self.std).clamp(-self.limit, self.limit)


class MinMaxNormalizer(nn.Module):
    """Maps the data's range [minimum, maximum] to [-1, 1] and back; the identity until fitted, or
    for good if it is `kept`, for values that are normalised already.
    """

    middle: Tensor
    radius: Tensor

    def __init__(self, size: int, kept: bool = False) -> None:
        super().__init__()
        self.kept = kept  # `fit` leaves it as it is
        self.register_buffer("middle", torch.zeros(size))
        self.register_buffer("radius", torch.ones(size))

    def fit(self, values: Tensor) -> None:
        """Set the range from `values` [N, size]; the scale of an element is at least 1e-2."""
        if self.kept:
            return
        low, high = values.float().amin(0), values.float().amax(0)
        self.middle.copy_((high + low) / 2)
        self.radius.copy_(((high - low) / 2).clamp(min=1e-2))

    def forward(self, values: Tensor) -> Tensor:
        return (values - self.middle) / self.radius

    def inverse(self, values: Tensor) -> Tensor:
        return values * self.radius + self.middle


class HasMoments(Protocol):
    """Counts samples and has their mean and sum of squared deviations, in float64."""

    count: Tensor
    mean: Tensor
    squares: Tensor


def merge_moments(moments: HasMoments, new: Tensor, mean: Tensor, squares: Tensor) -> None:
    """Merge those of `new` samples exactly (Chan, Golub and LeVeque, 1983): with n = n_a + n_b and
    d = m_b - m_a,  m = m_a + d n_b / n,  S = S_a + S_b + d^2 n_a n_b / n."""
    total = (moments.count + new).clamp(min=1)
    apart = mean - moments.mean
    moments.squares += squares + apart.square() * moments.count * new / total
    moments.mean += apart * new / total
    moments.count += new


class RunningMeanStd:
    """Running mean and std of vectors [N, size], in float64. With a `memory`, older samples are
    discounted: the total weight is at most that of `memory` samples."""

    def __init__(
        self, size: int, device: torch.device | str = "cpu", memory: int | None = None
    ) -> None:
        self.memory = memory
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.squares = torch.zeros(size, dtype=torch.float64, device=device)

    def update(self, values: Tensor) -> None:
        """Merge a batch `values` [N, size]."""
        if not len(values):
            return
        new = len(values)
        values = values.detach().double()
        mean = values.mean(0)
        merge_moments(self, torch.full_like(self.count, new), mean, (values - mean).square().sum(0))
        if self.memory is not None:
            kept = (self.memory / self.count).clamp(max=1)
            self.squares *= kept
            self.count *= kept

    @property
    def std(self) -> Tensor:
        """Population standard deviation [size] (float32); 1 where it is below 1e-6."""
        std = (self.squares / self.count.clamp(min=1)).sqrt().float()
        return torch.where(std < 1e-6, torch.ones_like(std), std)

    def normalize(self, values: Tensor, clip: float = 5.0) -> Tensor:
        """`values` [N, size] with zero mean and unit deviation, clipped to +-`clip`."""
        return ((values - self.mean.float()) / self.std).clamp(-clip, clip)

    def get_state(self) -> dict[str, Any]:
        return each({"count": self.count, "mean": self.mean, "squares": self.squares}, torch.clone)

    def set_state(self, state: dict[str, Any]) -> None:
        self.count.copy_(state["count"])
        self.mean.copy_(state["mean"])
        self.squares.copy_(state["squares"])
