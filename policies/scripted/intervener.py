"""Interveners: decide when to take over from a policy, and which actions to take meanwhile.

A simulated person takes over when there is no progress, and is an imperfect expert (RLIF; Luo et
al., 2024). For real people see `embodied.real_robot.teleop.teleop`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.bounds import Count, Fraction, NonNegative
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


class Intervener(Protocol):
    """Called once per control step, with consecutive steps of all envs."""

    def over(self, obs: Tensors, first: Tensor) -> Tensor:
        """[n] (bool): whether the intervener controls each env from now on; `first` [n]: an episode
        has just started.
        """
        ...

    def act(self, obs: Tensors, first: Tensor) -> Tensor:
        """The intervener's actions [n, A] in [-1, 1]; called whether or not it has control."""
        ...

    def executed(self, action: Tensor) -> None:
        """Called after each step with the actions [n, A] that were executed, whoever chose them."""

    def close(self) -> None:
        """Release what was opened; called at the end. By default this does nothing."""


@dataclass(frozen=True)
class Config:
    """Settings of an intervener, which takes over when the distance stops decreasing."""

    hand: Node  # node of the policy that takes over
    distance: str = "goal_from_tool"  # NAME of the observed elements NAME_x, NAME_y, NAME_z
    patience: Count = 6  # steps without progress before it takes over
    better: NonNegative = 0.02  # decrease of the distance that is progress, m
    hold: Count = 5  # steps after which it releases control
    blunder: Fraction = 0.0  # share of steps with a takeover for no reason


class ProgressIntervener(Intervener):
    """One state per env; its own generator decides when it blunders."""

    def __init__(self, config: Config, spec: Spec, num_envs: int, seed: int = 0) -> None:
        self.config = config
        names = spec.obs["state"].names if "state" in spec.obs else ()
        wanted = [f"{config.distance}_{axis}" for axis in "xyz"]
        if missing := [name for name in wanted if name not in names]:
            raise ConfigError(f"intervener: {missing[0]} is not an element of obs/state")
        self.index = torch.tensor([names.index(name) for name in wanted])
        self.actor = Actor(build(config.hand, Policy, spec=spec).eval(), num_envs)
        self.random = torch.Generator().manual_seed(seed)
        self.best = torch.full((num_envs,), torch.inf)
        self.waited = torch.zeros(num_envs, dtype=torch.int64)
        self.left = torch.zeros(num_envs, dtype=torch.int64)

    def over(self, obs: Tensors, first: Tensor) -> Tensor:
        far = obs["state"][:, self.index].norm(dim=1)
        self.best = self.best.masked_fill(first, torch.inf)
        better = far < self.best - self.config.better
        self.best = torch.where(better, far, self.best)
        self.waited = torch.where(better | first, 0, self.waited + 1)
        self.left = (self.left - 1).clamp(min=0).masked_fill(first, 0)
        blunder = torch.rand(len(far), generator=self.random) < self.config.blunder
        takes = ((self.waited >= self.config.patience) | blunder) & (self.left == 0) & ~first
        self.left = torch.where(takes, self.config.hold, self.left)
        # Progress is measured anew after control is released.
        self.waited = torch.where(self.left > 0, 0, self.waited)
        self.best = torch.where(self.left > 0, far, self.best)
        return self.left > 0

    @torch.no_grad()
    def act(self, obs: Tensors, first: Tensor) -> Tensor:
        return self.actor(obs, first)
