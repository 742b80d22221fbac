"""Fr3Course: the FR3 in a table-top maze of boxes, with levels for curriculum teachers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.envs.fr3 import env as fr3_env
from embodied.envs.fr3.env import Fr3
from embodied.envs.fr3.tasks.goal import SIDE
from embodied.envs.maze.levels import MazeLevels
from embodied.envs.mujoco.batch_env import Floats, Rows


@dataclass(frozen=True)
class Config(fr3_env.Config):
    """Settings as in `embodied.envs.fr3.env.Config`, for the task course."""

    task: str = "course"  # course, no other
    blocks: Count = 12  # most boxes in a sampled level


class Fr3Course(Fr3):
    """Levels as in `embodied.envs.maze.env`, always with a path from start to goal; `held_out` are
    for evaluation. Rising above the boxes ends an episode without success.
    """

    def __init__(self, config: Config) -> None:
        if config.task != "course" or config.ranges or config.randomize:
            raise ConfigError(
                "Fr3Course: task must be course; ranges and randomize are not supported"
            )
        self.levels = MazeLevels(SIDE, config.blocks)
        self.held_out = torch.from_numpy(self.levels.held_out).float()
        super().__init__(config)
        assert self.spec.task is not None and self.spec.task.names == self.levels.names
        self.spec = replace(self.spec, task=replace(self.spec.task, unit="level"))

    def _begin(self, rows: Rows, task: Floats | None) -> None:
        if task is None:
            task = self.task.copy()
            for row in rows:
                task[row] = self.levels.random(1, self.generators[row])[0]
        super()._begin(rows, task)
