"""Ogbench: the single-task environments of OGBench (Park et al., 2025) in this process.

The package's environments as they are: rewards are 0 once all is done and -1 for each thing that is
not (`cube-single`: -1 or 0), success ends the episode. With `play` an episode is play data instead:
see `embodied.envs.ogbench.task`.
"""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass

import gymnasium
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.env import RETURN_ENDS, Step

try:
    import ogbench
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"OGBench cannot be imported ({error}); type: pip install 'embodied-rl[ogbench]'",
        name=error.name,
    ) from error

from embodied.envs import gym
from embodied.envs.ogbench.task import Play, Task

assert ogbench  # imported for the ids that it registers


@dataclass(frozen=True)
class Config:
    """Settings of an OGBench task."""

    id: str  # as cube-single-singletask-task2-v0 (no number: the one that the benchmark reports)
    num_envs: Count = 1  # parallel environments
    play: bool = False  # an oracle plays in the scene; the rewards are those of the task
    horizon: Count | None = None  # replaces the time limit (steps; of play: 1,001)
    text: str = ""  # task instruction as a sentence


class Ogbench(gym.Gym):
    """Separate environments; env i is seeded with (seed, i). The state cannot be saved."""

    def __init__(self, config: Config) -> None:
        self.play = config.play  # then a success is where returns end, and the episode goes on
        if "-singletask" not in config.id or config.id not in gymnasium.registry:
            known = [name for name in gymnasium.registry if "-singletask" in name]
            near = difflib.get_close_matches(config.id, known, n=3, cutoff=0.0)
            raise ConfigError(f"env.id={config.id} is no single task; {', '.join(near)} are")
        super().__init__(
            gym.Config(config.id, config.num_envs, horizon=config.horizon, text=config.text)
        )

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        if self.play:
            step.log[RETURN_ENDS] = step.log["success"]
        return step

    def make_one(self) -> gymnasium.Env:
        name = self.config.id
        horizon = self.config.horizon
        with warnings.catch_warnings():  # of the package's Boxes, about their precision
            warnings.simplefilter("ignore", UserWarning)
            if self.play:
                return Play(name, horizon)
            return Task(gymnasium.make(name, disable_env_checker=True, max_episode_steps=horizon))
