"""EpisodicDensity: adds an episodic density model of the observations and the episode's progress.

The density model of Adversarial Surprise (Fickinger et al., 2021): for each position i of an image
of symbols, the frequency of symbol j in this episode,

    theta_ij = max(n_ij / N, floor),   1 / S for all S symbols while N = 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError, nearest
from embodied.core.env import StateRoles, VecEnv
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.wrappers.stack import EpisodeWrapper

KNOWN = "known"
CLOCK = "clock"


@dataclass(frozen=True)
class Config:
    """Settings of the density of an episode's observations."""

    of: str = "view"  # the observation of symbols
    horizon: Count = 128  # steps at which `clock` is 1
    floor: Positive = 1e-3  # smallest probability of a symbol


class EpisodicDensity(EpisodeWrapper):
    """Adds the observations `known` [P * S] (theta) and `clock` [1]. Every observation after an
    action is counted, unless `count` switched it off.
    """

    memory_roles = StateRoles({"age": None})

    def __init__(self, config: Config, env: VecEnv) -> None:
        if config.of not in env.spec.obs:
            raise ConfigError(
                f'EpisodicDensity: no observation "{config.of}"{nearest(config.of, env.spec.obs)}'
            )
        leaf = env.spec.obs[config.of]
        if leaf.unit != SYMBOL or not isinstance(leaf.high, int | float):
            raise ConfigError(f"EpisodicDensity: {config.of} is not an image of symbols")
        self.symbols = int(leaf.high) + 1
        self.places = leaf.size
        known = Leaf((self.places * self.symbols,), low=0.0, high=1.0)
        spec: Spec = env.spec.with_obs(**{KNOWN: known, CLOCK: Leaf((1,), low=0.0, high=1.0)})
        super().__init__(env, spec)
        self.config = config
        n = self.num_envs
        self.memory["counts"] = torch.zeros(n, self.places, self.symbols)
        self.memory["age"] = torch.zeros(n)
        self.memory["counting"] = torch.ones(n, dtype=torch.bool)

    def count(self, on: bool) -> None:
        self.memory["counting"] = torch.full_like(self.memory["counting"], on)

    def surprise(self, before: Tensors, after: Tensors) -> Tensor:
        """[B]: -log theta of the picture `after`, where theta is what was known `before`, the mean
        over its places."""
        theta = before[KNOWN].unflatten(1, (self.places, self.symbols))
        picture = after[self.config.of].flatten(1).long()
        return -theta.gather(2, picture[..., None])[..., 0].log().mean(1)

    def see(self, obs: Tensors) -> None:
        memory = self.memory
        picture = obs[self.config.of].flatten(1).long()
        shown = functional.one_hot(picture, self.symbols).float()
        memory["counts"] = memory["counts"] + shown * memory["counting"][:, None, None]
        memory["age"] = memory["age"] + 1

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        memory = self.memory
        memory["counts"] = memory["counts"] * ~rows[:, None, None]
        memory["age"] = memory["age"] * ~rows

    def transform_obs(self, obs: Tensors) -> Tensors:
        counts = self.memory["counts"]
        total = counts.sum(2, keepdim=True)
        theta = (counts / total.clamp(min=1)).clamp(min=self.config.floor)
        theta = torch.where(total > 0, theta, 1 / self.symbols)
        clock = (self.memory["age"] / self.config.horizon).clamp(max=1)
        return {**obs, KNOWN: theta.flatten(1), CLOCK: clock[:, None]}
