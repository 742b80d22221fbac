"""Prioritized experience replay (PER, Schaul et al., 2016).

    P(i) = p_i^alpha / sum_j p_j^alpha,   p = |error| + epsilon
    w_i = (N P(i))^-beta / max_j (N P(j))^-beta   over the batch

`error` is the TD error. New transitions get the largest priority so far. Priorities are the leaves
of a sum tree: sampling or updating n of them takes O(n log(capacity)) operations, batched over n.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.core.bounds import Count, Fraction, NonNegative
from embodied.core.tensors import Tensors, length

BELOW = 1 - 2**-52  # a sum times this is strictly less


@dataclass(frozen=True)
class Config:
    alpha: NonNegative = 0.6  # priority exponent (0: uniform)
    beta: Fraction = 0.4  # exponent of the importance weights, annealed to 1
    anneal: Count = 100_000  # batches until beta is 1
    epsilon: NonNegative = 1e-3  # added to every TD error


class SumTree:
    """A sum tree with `size` non-negative leaves; every inner node is the sum of FAN children. A
    large FAN makes the tree shallow, so that a batch needs few vectorised operations."""

    FAN = 32

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.levels: list[Tensor] = []  # [nodes, FAN] each, from the root down
        nodes = size
        while nodes > 1 or not self.levels:
            nodes = -(-nodes // self.FAN)
            # float64: a single leaf must remain visible in a sum of a million.
            level = torch.zeros(nodes, self.FAN, dtype=torch.float64, device=device)
            self.levels.insert(0, level)
        self.leaves = self.levels[-1].view(-1)

    @property
    def total(self) -> Tensor:
        return self.levels[0].sum()

    def put(self, index: Tensor, value: Tensor) -> None:
        """Set leaves `index` [n] to `value` [n]; of a repeated index, one value is kept."""
        self.leaves[index] = value.to(self.leaves.dtype)
        for upper, lower in reversed(list(pairwise(self.levels))):
            sums = upper.view(-1)
            if len(index) < len(lower):
                index = index // self.FAN
                sums[index] = lower.index_select(0, index).sum(1)
            else:  # updating all sums is cheaper
                sums[: len(lower)] = lower.sum(1)

    def find(self, mass: Tensor) -> Tensor:
        """The leaves [n] at which the cumulative sum exceeds `mass` [n], each in [0, total)."""
        place = torch.zeros_like(mass, dtype=torch.int64)
        mass = mass.to(self.leaves.dtype)[:, None]
        for level in self.levels:
            rows = level.index_select(0, place)
            running = rows.cumsum(1)
            # Keep mass in [0, sum): rounding must not select a leaf of priority 0.
            mass = torch.minimum(mass.clamp(min=0), running[:, -1:] * BELOW)
            slot = torch.searchsorted(running, mass, right=True)
            mass = mass - running.gather(1, slot) + rows.gather(1, slot)
            place = place * self.FAN + slot[:, 0]
        return place


class PrioritizedReplayBuffer(ReplayBuffer):
    """A ReplayBuffer whose batches also have `index` (int64) and importance `weight` (float32)."""

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
        """`n` transitions, one from each of `n` equal strata of the sum of priorities. They are in
        random order, so that slices of a batch are alike and not each of another age."""
        if not self.size:
            raise ValueError("the replay buffer is empty: add transitions before sampling")
        spread = torch.rand(n, dtype=torch.float64, device=self.device)
        spread += torch.randperm(n, device=self.device)
        total = self.tree.total
        index = self.tree.find(spread * (total / n))
        share = self.tree.leaves[index] / total
        beta = self.config.beta + (1 - self.config.beta) * min(self.batches / self.config.anneal, 1)
        weight = (self.size * share).pow(-beta)
        self.batches += 1
        return {**self.take(index), "index": index, "weight": (weight / weight.max()).float()}

    def settle(self, index: Tensor, error: Tensor) -> None:
        """Set the priorities of transitions `index` [n] from absolute TD errors `error` [n]."""
        priority = (error.double() + self.config.epsilon).pow(self.config.alpha)
        self.top = torch.maximum(self.top, priority.max())
        self.tree.put(index, priority)

    def get_state(self) -> dict[str, Any]:
        leaves = self.tree.leaves[: self.size].clone()
        own = {"priorities": leaves, "top": self.top, "batches": self.batches}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        self._forget()
        super().set_state(state)
        leaves = state["priorities"].to(self.tree.leaves)
        self.tree.put(torch.arange(len(leaves), device=self.device), leaves)
        self.top, self.batches = state["top"].to(self.tree.leaves), state["batches"]
