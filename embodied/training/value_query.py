"""TaskValueEstimator: the learner's state values at the initial observations of tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from embodied.core import tensors as tt
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.learners.learner import HasStateValues, Learner
from embodied.teachers.teacher import Floats

SEED = 20_000  # of the randomness in initial states; the same in every call


class TaskValueEstimator:
    """Resets an environment of its own (`node`) to tasks and evaluates the learner's values."""

    def __init__(self, node: dict[str, Any], learner: Learner, device: torch.device) -> None:
        self.node, self.learner, self.device = node, learner, device
        self.env: VecEnv | None = None

    def values(self, tasks: Floats) -> Floats:
        """Values [n] of episodes with `tasks` [n, D]."""
        env = build(self.node, VecEnv) if self.env is None else self.env
        self.env, size = env, env.num_envs
        parts = [self._some(env, tasks[at : at + size]) for at in range(0, len(tasks), size)]
        return np.concatenate(parts)

    @torch.no_grad()
    def _some(self, env: VecEnv, tasks: Floats) -> Floats:
        learner = self.learner
        assert isinstance(learner, HasStateValues)
        rows = np.resize(tasks, (env.num_envs, tasks.shape[1]))  # fills the last batch
        obs = env.reset(SEED, torch.from_numpy(rows).float().to(env.device))
        values = learner.state_values(tt.to(obs, self.device))[: len(tasks)]
        return values.double().cpu().numpy()


def task_value_estimator(
    node: dict[str, Any], learner: Learner, device: torch.device
) -> TaskValueEstimator | None:
    """The estimator; None if the learner has no values in units of the environment's reward."""
    if not isinstance(learner, HasStateValues) or learner.estimates is None:
        return None
    return TaskValueEstimator(node, learner, device)
