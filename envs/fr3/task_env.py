"""What batches of arms with a task share.

It is apart from `base`, which a robot's real-time process imports: PyTorch has no place there.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from embodied.embodiments.arrays import Floats
from embodied.envs.fr3.base import TaskInstance
from embodied.envs.fr3.tasks.task import Task, View
from embodied.envs.mujoco.batch_env import MujocoVecEnv, Outcome, Rows


class TaskEnv(MujocoVecEnv):
    """A batch of arms with a task: `given`, and `what` it is; subclasses have `view`."""

    given: TaskInstance
    what: Task

    @abstractmethod
    def view(self, rows: Rows) -> View:
        """The `View` of `rows` for rewards, observations and descriptions."""

    def native(self, rows: Rows) -> dict[str, Floats]:
        """Task parameters [n] of `rows` in their own units, by name."""
        return self.given.native(self.task[rows])

    def outcome(self, action: Floats) -> Outcome:
        return Outcome(*self.given.judge(self.view(np.arange(self.num_envs))))

    def describe(self, row: int = 0) -> str:
        return self.what.describe(self.view(np.array([row])))
