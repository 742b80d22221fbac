"""Tasks: several tasks of one environment, told by their numbers.

Parallel env i of B has the tasks i, i + B, i + 2 B, ..., modulo their number: always the same one
where B is a multiple of it. For one policy of several tasks, which observes the task's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core.bounds import Fraction
from embodied.core.build import ConfigError, nearest
from embodied.core.env import HasHeldOutTasks, StateRoles, Step, VecEnv
from embodied.core.spec import SYMBOL, TASK_NUMBER, Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.envs.row_rng import RowRng


@dataclass(frozen=True)
class Config:
    """Settings of several tasks."""

    tasks: tuple[Mapping[str, Fraction], ...]  # of each, elements of the task vector by name


class Tasks(Wrapper):
    """Adds the observation `task_number`, a symbol. Elements of the task vector that a task does
    not name are drawn anew, uniform in [0, 1], for each episode."""

    # `begun` counts an env's own episodes, whichever states it takes over in between.
    memory_roles = StateRoles(generators={"generator": None, "begun": None})

    def __init__(self, config: Config, env: VecEnv) -> None:
        if env.spec.task is None or find_protocol(env, HasHeldOutTasks) is not None:
            raise ConfigError(
                "Tasks needs an environment with a task vector, none of which are held out"
            )
        names = env.spec.task.names
        self.count = len(config.tasks)
        number = Leaf((1,), "int64", 0, max(self.count - 1, 1), SYMBOL)
        super().__init__(env, replace(env.spec, task=None).with_obs(**{TASK_NUMBER: number}))
        values = torch.full((self.count, len(names)), torch.nan)
        for place, task in enumerate(config.tasks):
            for name, value in task.items():
                if name not in names:
                    raise ConfigError(f'tasks: there is no element "{name}"{nearest(name, names)}')
                values[place, names.index(name)] = value
        self.tasks = values.to(self.device)
        self.streams = RowRng(self.depth << 40, self.num_envs, self.device)
        self.memory["generator"] = self.streams.state
        self.fresh = torch.arange(-self.num_envs, 0, device=self.device)
        self.memory["begun"] = self.fresh
        self.memory["number"] = self.memory["begun"] % self.count  # of the running episodes

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            raise ValueError("the tasks are fixed; call reset without `task`")
        rows = self.rows(mask)
        if seed is not None:
            self.seed_rows(seed, rows)
            self.memory["begun"] = torch.where(rows, self.fresh, self.memory["begun"])
        return self.transform_obs(self.env.reset(seed, self._drawn(rows), mask))

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        following = self.transform_obs({key: leaf.clone() for key, leaf in step.next_obs.items()})
        if not step.ended.any():
            return replace(step, obs=following, next_obs=following)
        obs = self.transform_obs(self.env.reset(None, self._drawn(step.ended), step.ended))
        return replace(step, obs=obs, next_obs=following)

    def _drawn(self, rows: Tensor) -> Tensor:
        """Task vectors [B, D], those of `rows` [B] (bool), which begin, from their generators."""
        self.streams.state = self.memory["generator"]
        self.memory["begun"] = self.memory["begun"] + self.num_envs * rows
        number = self.memory["begun"] % self.count
        self.memory["number"] = torch.where(rows, number, self.memory["number"])
        index = rows.nonzero().flatten()
        given = self.tasks[self.memory["number"]]
        drawn = torch.zeros_like(given)
        if len(index):
            drawn[index] = self.streams.uniform(given.shape[1], index).mT
        return torch.where(given.isnan(), drawn, given)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, TASK_NUMBER: self.memory["number"][:, None]}
