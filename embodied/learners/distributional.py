"""Categorical return distributions (C51): a critic predicts probabilities of fixed atoms.

C51 (Bellemare, Dabney and Munos, 2017). The backup moves every atom, z -> r + d z, cuts it off at
the ends of the support and shares its probability between the two atoms next to it, so that the
mean is kept; the critic learns the result by cross entropy, whose slopes are bounded however wrong
the values are.
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
                f"a support needs low < high and 2 atoms, not {self.count} from {self.low} to "
                f"{self.high}"
            )

    def atoms(self, device: torch.device | str = "cpu") -> Tensor:
        """The values [K]."""
        return torch.linspace(self.low, self.high, self.count, device=device)

    def mean(self, logits: Tensor) -> Tensor:
        """Expected values [...] of logits [..., K]."""
        return logits.softmax(-1) @ self.atoms(logits.device)

    def project(self, probabilities: Tensor, values: Tensor) -> Tensor:
        """Probabilities [N, M] of any `values` [N, M] as probabilities [N, K] of the atoms."""
        width = (self.high - self.low) / (self.count - 1)
        place = (values.clamp(self.low, self.high) - self.low) / width
        below = place.floor().clamp(0, self.count - 2)
        share = place - below
        index = below.long()
        shared = values.new_zeros(values.shape[0], self.count)
        shared.scatter_add_(1, index, probabilities * (1 - share))
        return shared.scatter_add_(1, index + 1, probabilities * share)

    def back_up(self, logits: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """The distribution [N, K] of r + d z with z as `logits` [N, K] say; `reward`, `discount`
        [N]."""
        moved = reward[:, None] + discount[:, None] * self.atoms(logits.device)
        return self.project(logits.softmax(-1), moved)

    def lowest(self, logits: Tensor) -> Tensor:
        """Of E distributions [E, N, K] the one with the smallest mean, row by row: [N, K]."""
        least = self.mean(logits).argmin(0)
        return logits.gather(0, least[None, :, None].expand(1, -1, self.count)).squeeze(0)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Sum over critics of the mean cross entropy; `logits` [E, N, K], `target` [N, K]."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean(1).sum()
