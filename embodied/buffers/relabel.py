"""Relabel: replaces the rewards of sampled transitions by those of a learned reward model."""

from __future__ import annotations

from embodied.buffers.source import Source
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors

ENV_REWARD = "env_reward"
"""Column of the environment's own rewards, in transitions that a reward model relabelled."""


class Relabel:
    """The transitions of `source` with the model's `reward`; the stored one is `env_reward`."""

    def __init__(self, source: Source, reward: Reward) -> None:
        self.source, self.reward = source, reward

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, n: int) -> Tensors:
        rows = self.source.sample(n)
        return {**rows, "reward": self.reward(rows), ENV_REWARD: rows["reward"]}
