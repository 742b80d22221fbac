"""Bandit: arms with normal rewards of unknown means, for policies that learn within a lifetime.

An episode is one pull. The means are the task vector; with `Trials` a lifetime of n pulls is a
bandit problem of length n, whose Bayes-optimal return is bounded by that of the best arm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero, NonNegative
from embodied.core.env import StateRoles, Step
from embodied.core.spec import BEST_ACTION, SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.row_rng import RowRng


@dataclass(frozen=True)
class Config:
    """Settings of the bandit."""

    arms: Annotated[int, Bound(2)] = 5  # arms, with means that are uniform in [0, 1]
    noise: NonNegative = 0.3  # standard deviation of a reward
    num_envs: Count = 64  # parallel environments
    seed: CountOrZero = 0  # of the random numbers


@dataclass(frozen=True)
class Mean:
    """A task parameter: the mean reward of one arm."""

    name: str
    low: float = 0.0
    high: float = 1.0
    unit: str = ""


class Bandit(BatchedEnv):
    """Observation: `time` [1], always 0, and `privileged/best_action` [1], the best arm.
    `log["regret"]` is the best mean less that of the arm; success: it was the best arm.
    """

    name = "bandit"
    kept: ClassVar = {"means": "means", "pulled": "pulled", "stream": "streams.state"}

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.parameters = tuple(Mean(f"arm_{i}") for i in range(config.arms))
        names = tuple(each.name for each in self.parameters)
        act = Leaf((), "int64", low=0, high=config.arms - 1)
        best = Leaf((1,), "int64", low=0, high=config.arms - 1, unit=SYMBOL)
        obs = {"time": Leaf((1,), low=0.0, high=1.0), BEST_ACTION: best}
        task = Leaf((config.arms,), low=0.0, high=1.0, names=names)
        self.spec = Spec(obs, act, 1.0, task, "pull the arm with the highest mean reward")
        self.streams = RowRng(config.seed, config.num_envs)
        self.means = torch.zeros(config.num_envs, config.arms)
        self.pulled = torch.zeros(config.num_envs, dtype=torch.int64)

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        drawn = self.streams.uniform(self.config.arms, rows).T
        self.means[rows] = drawn if task is None else task[rows].float()

    def step(self, action: Tensor) -> Step:
        arms = self.config.arms
        if action.shape != (self.num_envs,) or not bool(((action >= 0) & (action < arms)).all()):
            raise ValueError(f"bandit: actions must be [{self.num_envs}] integers below {arms}")
        self.pulled = action.clone()
        mean = self.means.gather(1, action[:, None])[:, 0]
        reward = mean + self.config.noise * self.streams.normal(1)[0]
        regret = self.means.amax(1) - mean
        following = self.observe(torch.arange(self.num_envs))
        ended = torch.ones(self.num_envs, dtype=torch.bool)
        log = {"success": regret == 0, "regret": regret}
        return self.finish(following, reward, ended, ~ended, log)

    def observe(self, rows: Tensor) -> Tensors:
        best = self.means[rows].argmax(1, keepdim=True)
        return {"time": torch.zeros(len(rows), 1), BEST_ACTION: best}

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({}, {"stream": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A bar for each arm, as high as its mean; the one that was pulled is red."""
        picture = torch.full((height, width, 3), 235, dtype=torch.uint8)
        slot = width // self.config.arms
        for arm, mean in enumerate(self.means[row].tolist()):
            colour = [200, 60, 50] if arm == int(self.pulled[row]) else [80, 110, 170]
            bar = slice(arm * slot + slot // 6, (arm + 1) * slot - slot // 6)
            picture[height - round(mean * height) :, bar] = torch.tensor(colour, dtype=torch.uint8)
        return picture

    def describe(self, row: int = 0) -> str:
        means = ", ".join(f"{mean:.2f}" for mean in self.means[row].tolist())
        return f"means {means}; pulled arm {int(self.pulled[row])}"
