"""Source: the protocol of everything that learners sample batches from; Relabel and Mixture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor

from embodied.core.tensors import Tensors

ENV_REWARD = "env_reward"
"""Column of the environment's own rewards, in transitions that a reward model relabelled."""


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


class Relabel:
    """The transitions of `source` with the rewards of `reward`; the stored one is `env_reward`."""

    def __init__(self, source: Source, reward: Callable[[Tensors], Tensor]) -> None:
        self.source = source
        self.reward = reward

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, n: int) -> Tensors:
        transitions = self.source.sample(n)
        return {
            **transitions,
            "reward": self.reward(transitions),
            ENV_REWARD: transitions["reward"],
        }


class Mixture:
    """Interleaves transitions of several sources, so that minibatch slices keep the fractions.

    With fractions (1/2, 1/2) the sources alternate; in general the pattern repeats every `period`
    transitions, and any slice whose length is a multiple of `period` has the exact fractions.
    """

    def __init__(self, sources: Sequence[Source], fractions: Sequence[float]) -> None:
        exact = [Fraction(f).limit_denominator(64) for f in fractions]
        if len(sources) != len(exact) or sum(exact) != 1 or min(exact) < 0:
            raise ValueError(f"fractions {list(fractions)} should be one per source and sum to 1")
        self.period = math.lcm(*(f.denominator for f in exact))
        self.counts = [int(f * self.period) for f in exact]
        self.sources = list(sources)

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def sample(self, n: int) -> Tensors:
        """`n` transitions; ValueError if `n` is not a multiple of the period or keys differ."""
        if n % self.period:
            raise ValueError(
                f"batch size {n} should be a multiple of {self.period} to mix the sources exactly"
            )
        times = n // self.period
        parts = [
            source.sample(count * times)
            for source, count in zip(self.sources, self.counts, strict=True)
            if count
        ]
        keys = set(parts[0])
        for part in parts[1:]:
            if set(part) != keys:
                raise ValueError(f"mixed sources differ in columns {sorted(keys ^ set(part))}")
        return {
            key: torch.cat(
                [part[key].reshape(times, -1, *part[key].shape[1:]) for part in parts], 1
            ).flatten(0, 1)
            for key in parts[0]
        }
