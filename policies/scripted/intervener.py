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
        """Called after each step with the actions [n, A] that were executed, whoever chose them.
        By default it does nothing."""

    def close(self) -> None:
        """At the end of the environment; by default it does nothing."""


@dataclass(frozen=True)
class Config:
    """`hand`: node of the policy that takes over. It takes over when |`distance`| (the elements
    `NAME_x, NAME_y, NAME_z` of the observation) has not decreased by `better` m in `patience`
    steps, and releases control after `hold` steps. `blunder`: share of steps with a takeover for no
    reason.
    """

    hand: Node
    distance: str = "goal_from_tool"
    patience: int = 6
    better: float = 0.02
    hold: int = 5
    blunder: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1 or self.hold < 1 or not 0 <= self.blunder <= 1:
            raise ConfigError("intervener: patience and hold must be at least 1, blunder in [0, 1]")


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
