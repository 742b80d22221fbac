"""TimeLimit: truncates episodes after a number of steps (as `gymnasium.wrappers.TimeLimit`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.envs.wrappers.stack import copied


@dataclass(frozen=True)
class LimitConfig:
    """Settings of a time limit."""

    steps: Count  # the longest episode; then it is truncated


class TimeLimit(Wrapper):
    """Truncates episodes after `steps` steps."""

    memory_roles = StateRoles({"age": None})

    def __init__(self, config: LimitConfig, env: VecEnv) -> None:
        super().__init__(env)
        self.steps = config.steps
        self.memory["age"] = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self.memory["age"] = self.memory["age"].masked_fill(self.rows(mask), 0)
        return self.env.reset(seed, task, mask)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        age = self.memory["age"] + 1
        late = (age >= self.steps) & ~step.ended
        self.memory["age"] = age.masked_fill(late | step.ended, 0)
        if not late.any():
            return step
        following = copied(step.next_obs)
        self._notify_before_reset(late)
        obs = self.env.reset(mask=late)
        return replace(step, obs=obs, next_obs=following, truncated=step.truncated | late)
