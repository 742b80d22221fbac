"""ExpRD and ExpAdaRD as rewards of a run: designed tables, in environments whose MDP is known.

The linear programs are in `embodied.rewards.analysis.informative`. They need the environment's
probabilities and its optimal policy: an upper baseline for rewards that are learned without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Positive
from embodied.core.build import ConfigError
from embodied.core.env import HasFiniteModel, Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors, under
from embodied.core.wrapper import find_protocol
from embodied.rewards.analysis.informative import HORIZONS, Designer, FiniteMdp


@dataclass(frozen=True)
class Config:
    """Settings of ExpRD."""

    most: Positive = 10.0  # largest size of a reward
    states: CountOrZero = 0  # states that pay beside those of the environment; 0: all states
    horizons: tuple[Count, ...] = HORIZONS  # steps after which rewards should tell actions apart


class ExpRd(Reward):
    """ExpRD: the reward table that is most informative at several horizons."""

    frozen = True

    def __init__(self, config: Config, gamma: float, device: torch.device) -> None:
        self.config = config
        self.gamma = gamma
        self.device = device
        self.table = torch.empty(0, device=device)  # [S, A]

    def augment_env(self, env: VecEnv) -> VecEnv:
        """Designs the table for `env`, which stays as it is."""
        model = find_protocol(env, HasFiniteModel)
        if model is None:
            raise ConfigError(
                "this reward needs an environment whose probabilities are known: env=chain, or one "
                "with finite_model and state_numbers"
            )
        self.model = model
        dynamics, reward, start = (part.double().cpu().numpy() for part in model.finite_model())
        self.designer = Designer(FiniteMdp(dynamics, reward, start, self.gamma), self.config.most)
        count = self.config.states
        every = range(len(start))
        self.states = self.designer.chosen(count, self.config.horizons) if count else [*every]
        self.table = self.first_table().to(self.device)
        return env

    def first_table(self) -> Tensor:
        """The table [S, A] at the start of the run."""
        table = self.designer.expert(self.states, self.config.horizons)
        return torch.from_numpy(table).float()

    def places(self, transitions: Tensors) -> tuple[Tensor, Tensor]:
        """States and actions [N] of transitions."""
        return self.model.state_numbers(under(transitions, "obs")), transitions["action"].flatten()

    def __call__(self, transitions: Tensors) -> Tensor:
        return self.table[self.places(transitions)]


@dataclass(frozen=True)
class AdaptiveConfig(Config):
    """Settings of ExpAdaRD."""

    every: Count = 100  # episodes between two designs, which are for the policy of the last ones


class ExpAdaRd(Remembered, ExpRd):
    """ExpAdaRD: a table that is most informative for the learner's policy as it is. The policy is
    estimated from the actions of the newest episodes; at first it is taken to be uniform."""

    frozen = False
    remembered = ("table", "counts", "episodes")

    def __init__(self, config: AdaptiveConfig, gamma: float, device: torch.device) -> None:
        super().__init__(config, gamma, device)
        self.every = config.every
        self.counts = torch.empty(0, device=device)  # [S, A]: actions of the newest episodes
        self.episodes = 0

    def first_table(self) -> Tensor:
        states, actions = self.designer.mdp.shape
        self.counts = torch.zeros(states, actions, device=self.device)
        return self.designed()

    def designed(self) -> Tensor:
        """The table [S, A] for the policy of `counts`, each action counted once more in all."""
        counts = self.counts.double() + 1 / self.counts.shape[1]
        policy = (counts / counts.sum(1, keepdim=True)).cpu().numpy()
        return torch.from_numpy(self.designer.adaptive(policy, self.states)).float()

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        places = self.places(transitions)
        self.counts.index_put_(places, torch.ones_like(places[0]).float(), accumulate=True)
        self.episodes += int(step.ended.sum())
        if self.episodes >= self.every:
            self.table = self.designed().to(self.device)
            self.counts.zero_()
            self.episodes = 0

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        """Nothing to learn from batches; the mean size of the rewards."""
        return {"size": self.table.abs().mean()}
