"""Source: the protocol of everything that learners sample batches from."""

from __future__ import annotations

from typing import Protocol

from embodied.core.tensors import Tensors


class Source(Protocol):
    """A collection of transitions, or of action chunks for imitation, that can be sampled.

    A transition is one decision: `obs/*`, `action`, `reward` (discounted sum over the k steps of
    the decision), `discount` (gamma^k; 0 where the environment terminated, never 0 at a time
    limit), `next_obs/*` (the final observation where the episode ended). A
    learner with `uses_executed_steps` gets that column of chunks too: k (int64). An imitation
    sample is `obs/*`, `action` [n, H, A] and `valid` [n, H].
    """

    def __len__(self) -> int: ...

    def sample(self, n: int) -> Tensors:
        """`n` transitions with replacement, by torch's default generator."""
        ...
