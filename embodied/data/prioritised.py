"""Prioritised: rows that surprised the learner are drawn more often (Schaul et al., 2016).

    P(i) = p_i^alpha / sum_j p_j^alpha,   p = |error| + epsilon
    w_i = (N P(i))^-beta / max_j (N P(j))^-beta   over the batch

New rows have the largest priority so far. Priorities are the leaves of a tree of sums, so that
drawing and changing n of them takes n log(capacity) steps, all n at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.core.tensors import Tensors, length
from embodied.data.replay import Replay


@dataclass(frozen=True)
class Config:
    """`alpha` 0 is uniform; `beta` corrects for it, fully at 1, which it reaches after `anneal`
    batches."""

    alpha: float = 0.6
    beta: float = 0.4
    anneal: int = 100_000
    epsilon: float = 1e-3


class SumTree:
    """Numbers >= 0 of `size` places and the sums of all their halves; node i has 2i and 2i + 1."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.depth = max(size - 1, 1).bit_length()
        self.leaves = 2**self.depth
        # Double precision: a sum of a million numbers must still tell one of them apart.
        self.nodes = torch.zeros(2 * self.leaves, dtype=torch.float64, device=device)

    @property
    def total(self) -> Tensor:
        return self.nodes[1]

    def at(self, index: Tensor) -> Tensor:
        return self.nodes[self.leaves + index]

    def put(self, index: Tensor, value: Tensor) -> None:
        """Set places `index` [n]; of a place named twice, one of the values stays."""
        node = self.leaves + index
        self.nodes[node] = value.to(self.nodes.dtype)
        for _ in range(self.depth):
            node = node // 2
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, mass: Tensor) -> Tensor:
        """The places [n] in which the running sum passes `mass` [n], each in [0, total)."""
        node, mass = torch.ones_like(mass, dtype=torch.int64), mass.to(self.nodes.dtype)
        for _ in range(self.depth):
            left = self.nodes[2 * node]
            # Rounding must not lead to where nothing is.
            right = (mass >= left) & (self.nodes[2 * node + 1] > 0)
            mass = mass - left * right
            node = 2 * node + right.long()
        return node - self.leaves


class Prioritised(Replay):
    """A Replay whose samples also hold `index` (int64) and `weight` (float32)."""

    columns: ClassVar[tuple[str, ...]] = ("index", "weight")

    def __init__(self, config: Config, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, device)
        self.config = config
        self._forget()

    def _forget(self) -> None:
        self.tree = SumTree(self.capacity, self.device)
        self.top = torch.ones((), dtype=torch.float64, device=self.device)
        self.batches = 0

    def add(self, rows: Tensors) -> None:
        n, begin = min(length(rows), self.capacity), self.cursor
        super().add(rows)
        where = (begin + torch.arange(n, device=self.device)) % self.capacity
        self.tree.put(where, self.top.expand(n))

    def sample(self, n: int) -> Tensors:
        """`n` rows, one from each of `n` equal parts of the sum of priorities."""
        if not self.size:
            raise ValueError("the replay is empty: add rows before sampling")
        spread = torch.rand(n, dtype=torch.float64, device=self.device)
        spread += torch.arange(n, device=self.device)
        index = self.tree.find(spread * (self.tree.total / n))
        share = self.tree.at(index) / self.tree.total
        beta = self.config.beta + (1 - self.config.beta) * min(self.batches / self.config.anneal, 1)
        weight = (self.size * share).pow(-beta)
        self.batches += 1
        return {**self.take(index), "index": index, "weight": (weight / weight.max()).float()}

    def settle(self, index: Tensor, error: Tensor) -> None:
        """Tell how far off the learner was on rows `index` [n]: `error` [n], absolute."""
        priority = (error.double() + self.config.epsilon).pow(self.config.alpha)
        self.top = torch.maximum(self.top, priority.max())
        self.tree.put(index, priority)

    def get_state(self) -> dict[str, Any]:
        leaves = self.tree.nodes[self.tree.leaves : self.tree.leaves + self.size].clone()
        own = {"priorities": leaves, "top": self.top, "batches": self.batches}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        self._forget()
        super().set_state(state)
        leaves = state["priorities"].to(self.tree.nodes)
        self.tree.put(torch.arange(len(leaves), device=self.device), leaves)
        self.top, self.batches = state["top"].to(self.tree.nodes), state["batches"]
