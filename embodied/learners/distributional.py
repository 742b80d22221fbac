"""Categorical return distributions (C51): a critic predicts probabilities of fixed atoms.

C51 (Bellemare, Dabney and Munos, 2017). The Bellman backup moves every atom, z -> r + d z, clips it
to the support and splits its probability between the two neighbouring atoms, which preserves the
mean. The critic is trained with cross entropy, whose gradient is bounded for any value error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Support:
    """`count` atoms, evenly spaced from `low` to `high`."""

    low: float = -10.0
    high: float = 10.0
    count: int = 101

    def __post_init__(self) -> None:
        if self.count < 2 or not self.low < self.high:
            raise ValueError(
                f"a support needs low < high and at least 2 atoms, got low={self.low}, "
                f"high={self.high}, {self.count} atoms"
            )

    def atoms(self, device: torch.device | str = "cpu") -> Tensor:
        """The values [K] of the atoms."""
        return torch.linspace(self.low, self.high, self.count, device=device)

    def mean(self, logits: Tensor) -> Tensor:
        """Expected values [...] of the distributions with logits [..., K]."""
        return logits.softmax(-1) @ self.atoms(logits.device)

    def project(self, probabilities: Tensor, values: Tensor) -> Tensor:
        """Project a distribution with `probabilities` [N, M] at `values` [N, M] onto the atoms,
        [N, K]."""
        width = (self.high - self.low) / (self.count - 1)
        place = (values.clamp(self.low, self.high) - self.low) / width
        below = place.floor().clamp(0, self.count - 2)
        share = place - below
        index = below.long()
        shared = values.new_zeros(values.shape[0], self.count)
        shared.scatter_add_(1, index, probabilities * (1 - share))
        return shared.scatter_add_(1, index + 1, probabilities * share)

    def back_up(self, logits: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """The projected distribution [N, K] of r + d z, where z has the `logits` [N, K]; `reward`,
        `discount` [N]."""
        moved = reward[:, None] + discount[:, None] * self.atoms(logits.device)
        return self.project(logits.softmax(-1), moved)

    def lowest(self, logits: Tensor) -> Tensor:
        """For each of N samples, the one of E distributions [E, N, K] with the smallest mean."""
        least = self.mean(logits).argmin(0)
        return logits.gather(0, least[None, :, None].expand(1, -1, self.count)).squeeze(0)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Sum over critics of the mean cross entropy; `logits` [E, N, K], `target` [N, K]."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean(1).sum()
