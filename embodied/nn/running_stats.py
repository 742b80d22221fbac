"""Moments: running mean and deviation of whatever passes, kept exactly for a resume.

Merged in groups: M2 += M2' + (m' - m)^2 n n' / (n + n') (Chan, Golub and LeVeque, 1983).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Moments:
    """Of rows [N, size]; float64, because sums over many rows outgrow single precision. With a
    `memory`, older rows fade: all together weigh as much as that many."""

    def __init__(
        self, size: int, device: torch.device | str = "cpu", memory: int | None = None
    ) -> None:
        self.memory = memory
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.squares = torch.zeros(size, dtype=torch.float64, device=device)

    def add(self, rows: Tensor) -> None:
        """Merge `rows` [N, size]."""
        if not len(rows):
            return
        rows, new = rows.detach().double(), len(rows)
        mean = rows.mean(0)
        total, apart = self.count + new, mean - self.mean
        self.squares += (rows - mean).square().sum(0) + apart.square() * self.count * new / total
        self.mean += apart * new / total
        self.count += new
        if self.memory is not None:
            kept = (self.memory / self.count).clamp(max=1)
            self.squares *= kept
            self.count *= kept

    @property
    def std(self) -> Tensor:
        """Population deviation [size] (float32), 1 where there is no spread to speak of."""
        std = (self.squares / self.count.clamp(min=1)).sqrt().float()
        return torch.where(std < 1e-6, torch.ones_like(std), std)

    def standard(self, rows: Tensor, clip: float = 5.0) -> Tensor:
        """Zero mean, unit deviation, cut off at +-`clip`."""
        return ((rows - self.mean.float()) / self.std).clamp(-clip, clip)

    def get_state(self) -> dict[str, Any]:
        return {k: getattr(self, k).clone() for k in ("count", "mean", "squares")}

    def set_state(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            getattr(self, key).copy_(value)
