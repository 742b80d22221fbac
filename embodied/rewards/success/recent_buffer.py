"""RecentBuffer: a ring buffer of the newest observations."""

from __future__ import annotations

import torch

from embodied.core import tensors as tt
from embodied.core.remembered import Remembered
from embodied.core.tensors import Tensors


class RecentBuffer(Remembered):
    """A ring buffer of `size` observations (leaves [N, ...]) on the CPU; `seen` counts all that
    were ever added."""

    remembered = ("ring", "seen")

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen = 0
        self.ring: Tensors = {}

    def push(self, moments: Tensors) -> None:
        count = min(tt.length(moments), self.size)
        at = (self.seen + torch.arange(count)) % self.size
        for name, value in moments.items():
            if name not in self.ring:
                shape = (self.size, *value.shape[1:])
                self.ring[name] = torch.zeros(shape, dtype=value.dtype)
            self.ring[name][at] = value[len(value) - count :].cpu()
        self.seen += count

    def kept(self) -> Tensors:
        """The stored observations, unordered; {} while empty."""
        return {name: value[: min(self.seen, self.size)] for name, value in self.ring.items()}
