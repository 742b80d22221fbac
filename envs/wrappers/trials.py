"""Trials: several episodes of one task as one lifetime, for policies that learn within it.

RL2 (Duan et al., 2016; Wang et al., 2016): a policy with memory, trained on lifetimes, learns the
task in the first episodes and uses it in the later ones. The lifetime is what a learner sees as an
episode: the memory is kept and the return is summed over its `episodes`, so the end of an inner
episode neither terminates nor truncates. The lifetime terminates with its last episode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.env import HasLevels, HasTaskParameters, NotSavable, StateRoles, Step, VecEnv
from embodied.core.spec import FIRST, LAST_ACTION, LAST_REWARD, Leaf, Spec
from embodied.core.tensors import Tensors, where
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.envs.row_rng import RowRng


@dataclass(frozen=True)
class Config:
    """Settings of lifetimes."""

    episodes: Count = 4  # episodes of one task, which make a lifetime


class Trials(Wrapper):
    """Adds the observations `last_action` [A] (choices one-hot) and `last_reward` [1], zero
    at the start of a lifetime, and `first` [1], 1 at the start of each inner episode. `log` gains
    `trial` [B], the number of the inner episode, from 0.
    """

    def __init__(self, config: Config, env: VecEnv) -> None:
        self.choices = Choices(env.spec).to(env.device)
        size = self.choices.width
        low = -1.0 if self.choices.numbers else 0.0
        more = {LAST_ACTION: Leaf((size,), low=low, high=1.0), LAST_REWARD: Leaf((1,))}
        spec: Spec = env.spec.with_obs(**more, **{FIRST: Leaf((1,), low=0.0, high=1.0)})
        super().__init__(env, spec)
        levels = find_protocol(env, HasLevels)
        described = find_protocol(env, HasTaskParameters)
        self.level_space = None if levels is None else levels.levels
        numbers = len(described.parameters) if described is not None else 0
        tasks = numbers if self.level_space is None else self.level_space.size
        if not tasks:
            raise ConfigError("Trials needs an environment with a task vector")
        self.episodes = config.episodes
        n = self.num_envs
        device = self.device
        self.streams = RowRng(self.depth << 40, n, device)
        self.memory["generator"] = self.streams.state
        self.memory["task"] = torch.zeros(n, tasks, device=device)
        self.memory["trial"] = torch.zeros(n, dtype=torch.int64, device=device)
        self.memory[LAST_ACTION] = torch.zeros(n, size, device=device)
        self.memory[LAST_REWARD] = torch.zeros(n, 1, device=device)
        self.memory[FIRST] = torch.ones(n, 1, device=device)

    @property
    def state_roles(self) -> StateRoles:
        """Refused: a lifetime has the clock of an inner episode besides its own."""
        raise NotSavable("a lifetime of trials cannot begin in the middle of another one")

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = self.rows(mask)
        if seed is not None:
            self.seed_rows(seed, rows)
        self._begin(rows, task)
        return self.transform_obs(self.env.reset(seed, self.memory["task"], mask))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        memory = self.memory
        trial = memory["trial"]
        ended = step.ended
        memory[LAST_ACTION] = self.choices.one_hot(action).clamp(-1, 1)
        memory[LAST_REWARD] = step.reward[:, None].to(memory[LAST_REWARD].dtype)
        memory[FIRST] = torch.zeros_like(memory[FIRST])
        log = {**step.log, "trial": trial}
        following = self.transform_obs({key: leaf.clone() for key, leaf in step.next_obs.items()})
        if not ended.any():
            return replace(step, obs=following, next_obs=following, log=log)
        memory["trial"] = trial + ended
        over = memory["trial"] >= self.episodes
        memory[FIRST] = ended[:, None].to(memory[FIRST].dtype)
        self._begin(over, None)
        obs = self.transform_obs(self.env.reset(task=memory["task"], mask=ended))
        # The successor of an inner episode's last action is the start of the next episode.
        following = where(over, following, obs)
        return Step(obs, following, step.reward, over, torch.zeros_like(over), log)

    def _begin(self, rows: Tensor, task: Tensor | None) -> None:
        """Start lifetimes in `rows` [B] (bool), of the tasks `task` [B, D] (None: drawn)."""
        memory = self.memory
        index = rows.nonzero().flatten()
        if len(index):
            chosen = self._draw(index) if task is None else task.to(self.device)[index].float()
            memory["task"] = memory["task"].index_copy(0, index, chosen)
        memory["trial"] = memory["trial"].masked_fill(rows, 0)
        for key, start in ((LAST_ACTION, 0), (LAST_REWARD, 0), (FIRST, 1)):
            memory[key] = memory[key].masked_fill(rows[:, None], start)

    def _draw(self, index: Tensor) -> Tensor:
        """Random tasks [n, D] of the envs `index` [n], from their own generators."""
        self.streams.state = self.memory["generator"]
        if self.level_space is None:
            return self.streams.uniform(self.memory["task"].shape[1], index).mT
        seeds = self.streams.words(1, index)[0].abs().tolist()
        drawn = [self.level_space.random(1, np.random.default_rng(seed)) for seed in seeds]
        return torch.as_tensor(np.concatenate(drawn), dtype=torch.float32, device=self.device)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, **{name: self.memory[name] for name in (LAST_ACTION, LAST_REWARD, FIRST)}}
