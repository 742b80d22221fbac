"""NewestReplayBuffer: a replay buffer that has the newest transitions more often in its batches.

The two buffers of GR-RL (ByteDance Seed, 2025), sampled equally: everything (the recordings and the
base policy's episodes before training), and the newest, which are of almost the present policy. The
paper's newest are the episodes of the last checkpoints, here a number of transitions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from embodied.buffers.replay import ReplayBuffer
from embodied.core.bounds import Count, Fraction
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class Config:
    """Settings of a replay buffer with a share of new transitions."""

    share: Fraction = 0.5  # of a batch from the newest transitions
    newest: Count = 2000  # how many transitions these are


class NewestReplayBuffer(ReplayBuffer):
    """A uniform ReplayBuffer, a share of whose samples is of the newest transitions."""

    def __init__(self, config: Config, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity, device)
        self.config = config

    def sample(self, n: int) -> Tensors:
        """`n` transitions with replacement, the newest ones at random places among them."""
        if not self.size:
            raise ValueError("the replay buffer is empty: add transitions before sampling")
        own = round(self.config.share * n)
        every = torch.randint(self.size, (n - own,), device=self.device)
        most = min(self.config.newest, self.size)
        age = torch.randint(most, (own,), device=self.device)
        index = torch.cat([every, (self.cursor - 1 - age) % self.capacity])
        return self.take(index[torch.randperm(n, device=self.device)])
