"""Source: where a learner's batches come from."""

from __future__ import annotations

from typing import Protocol

from embodied.core.tensors import Tensors


class Source(Protocol):
    """Anything with rows to sample.

    A reinforcement-learning row is one decision: `obs/*`, `action`, `reward` (discounted sum over
    the k steps that the decision lasted), `discount` (gamma^k, 0 where the world ended: never 0 at
    a time limit), `next_obs/*` (the true successor). An imitation row is `obs/*`, `action`
    [n, H, A] and `valid` [n, H].
    """

    def __len__(self) -> int: ...

    def sample(self, n: int) -> Tensors:
        """`n` rows, uniformly and with replacement, by torch's default generator."""
        ...
