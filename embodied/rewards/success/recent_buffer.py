"""RecentBuffer: a ring buffer of the newest observations."""

from __future__ import annotations

from typing import Any

import torch

from embodied.core import tensors as tt
from embodied.core.tensors import Tensors


class RecentBuffer:
    """A ring buffer of `size` observations (leaves [N, ...]) on the CPU; `seen` counts all that
    were ever added."""

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
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

    def get_state(self) -> dict[str, Any]:
        return {"rows": tt.each(self.ring, torch.clone), "count": self.seen}

    def set_state(self, state: dict[str, Any]) -> None:
        self.ring, self.seen = tt.each(state["rows"], torch.clone), state["count"]
