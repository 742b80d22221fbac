"""RunningMeanStd: running mean and standard deviation (Welford's algorithm, in batches).

M2 += M2' + (m' - m)^2 n n' / (n + n')      (Chan, Golub and LeVeque, 1983)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.core.tensors import each


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
        total = self.count + new
        apart = mean - self.mean
        self.squares += (values - mean).square().sum(0) + apart.square() * self.count * new / total
        self.mean += apart * new / total
        self.count += new
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
        state = {"count": self.count, "mean": self.mean, "squares": self.squares}
        return each(state, torch.clone)

    def set_state(self, state: dict[str, Any]) -> None:
        self.count.copy_(state["count"])
        self.mean.copy_(state["mean"])
        self.squares.copy_(state["squares"])
