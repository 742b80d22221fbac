"""SparseSuccess: reward 1 at success, which terminates the episode; otherwise 0."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.wrapper import Wrapper
from embodied.envs.wrappers.stack import copied


@dataclass(frozen=True)
class Config:
    """No settings."""


class SparseSuccess(Wrapper):
    """A benchmark's task with sparse reward, in place of its own reward (Meta-World's goes on after
    success until the time limit). ConfigError where the environment reports no success."""

    def __init__(self, config: Config, env: VecEnv) -> None:
        super().__init__(env)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        if "success" not in step.log:
            raise ConfigError("SparseSuccess: the environment does not report success")
        success = step.log["success"].bool()
        early = success & ~step.ended  # the environment goes on: it is reset here
        step = replace(
            step,
            reward=success.to(step.reward.dtype),
            terminated=step.terminated | success,
            truncated=step.truncated & ~success,
        )
        if not early.any():
            return step
        following = copied(step.next_obs)
        self._notify_before_reset(early)
        return replace(step, obs=self.env.reset(mask=early), next_obs=following)
