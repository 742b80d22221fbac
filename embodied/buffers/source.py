"""Source: the protocol of everything that learners sample batches from; Relabel is one."""

from __future__ import annotations

from typing import Protocol

from embodied.core.reward import Reward
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
    """The transitions of `source` with the model's `reward`; the stored one is `env_reward`."""

    def __init__(self, source: Source, reward: Reward) -> None:
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
