"""SuccessBuffer: transitions of successful episodes, to be oversampled in batches.

After self-imitation learning (Oh et al., 2018). With sparse rewards these few transitions are the
ones that carry a reward signal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.source import Source
from embodied.core import tensors as tt
from embodied.core.tensors import Tensors


class SuccessBuffer:
    """A Source of the newest `capacity` transitions of successful episodes.

    It samples from `otherwise` until there is a success. Transitions are added when their episode
    has ended.
    """

    def __init__(
        self, capacity: int, otherwise: Source, device: torch.device | str = "cpu"
    ) -> None:
        self.kept, self.otherwise = ReplayBuffer(capacity, device), otherwise
        self.held: Tensors = {}  # transitions of running episodes, [longest so far, B, ...]
        self.count = self.won = torch.empty(0)
        self.most = 0  # upper bound of count, kept on the host to avoid a device sync

    def __len__(self) -> int:
        return len(self.kept)

    def sample(self, n: int) -> Tensors:
        return self.kept.sample(n) if len(self.kept) else self.otherwise.sample(n)

    def push(self, rows: Tensors, closed: Tensor | None, success: Tensor, ended: Tensor) -> None:
        """Add the transitions that one step of B parallel envs finished.

        `rows`: transitions (possibly none) of parallel envs `closed` (None: all, in order).
        `success` [B], `ended` [B] (bool): whether the goal was reached, and the episode ended.
        """
        if len(self.count) != len(ended):
            self.count = torch.zeros(len(ended), dtype=torch.int64, device=ended.device)
            self.won = torch.zeros_like(ended)
        if rows:
            who = torch.arange(len(ended), device=ended.device) if closed is None else closed
            self._hold(rows, who)
        self.won = self.won | success
        leaving = self.won & ended
        if self.held and leaving.any():
            times = torch.arange(len(next(iter(self.held.values()))), device=ended.device)
            row, at = ((times < self.count[:, None]) & leaving[:, None]).nonzero(as_tuple=True)
            if len(row):
                self.kept.add({key: value[at, row] for key, value in self.held.items()})
        self.count, self.won = self.count * ~ended, self.won & ~ended

    def _hold(self, rows: Tensors, who: Tensor) -> None:
        room = len(next(iter(self.held.values()))) if self.held else 0
        if not self.held:
            shape = (16, len(self.count))
            self.held = tt.each(rows, lambda leaf: leaf.new_zeros(*shape, *leaf.shape[1:]))
        elif self.most >= room:
            self.most = int(self.count.max())
            if self.most >= room:
                double = tt.each(self.held, torch.zeros_like)
                self.held = {k: torch.cat([leaf, double[k]]) for k, leaf in self.held.items()}
        for key, value in rows.items():
            self.held[key][self.count[who], who] = value
        self.count[who] += 1
        self.most += 1

    def forget(self, env_ids: Tensor) -> None:
        """Drop the transitions of the running episodes of parallel envs `env_ids` [n]."""
        if len(self.count):
            self.count[env_ids], self.won[env_ids] = 0, False

    def get_state(self) -> dict[str, Any]:
        return {
            "replay": self.kept.get_state(),
            "running": tt.each(self.held, torch.clone),
            "count": self.count.clone(),
            "succeeded": self.won,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.kept.set_state(state["replay"])
        self.held, self.count, self.won = state["running"], state["count"], state["succeeded"]
        self.most = int(self.count.max()) if len(self.count) else 0
