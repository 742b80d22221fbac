"""Wrappers that change when episodes end and how long a step is.

ActionRepeat applies each action several times and sums the rewards (frame skip).

    r = sum_{i<k} d^i r_i over the k <= n inner steps until the episode ends

(Mnih et al., 2015, repeat each action four times; d = 1 is the plain sum.) For the learner it is
one step of `n dt` seconds, discounted once by its own gamma.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core.bounds import Count, Fraction
from embodied.core.build import ConfigError
from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.tensors import Tensors, where
from embodied.core.wrapper import Wrapper
from embodied.envs.wrappers.stack import copied


@dataclass(frozen=True)
class LimitConfig:
    """Settings of a time limit."""

    steps: Count  # the longest episode; then it is truncated


class TimeLimit(Wrapper):
    """Truncates episodes after `steps` steps (as `gymnasium.wrappers.TimeLimit`)."""

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
        return replace(self.begun_anew(step, late), truncated=step.truncated | late)


@dataclass(frozen=True)
class RepeatConfig:
    """Settings of action repetition."""

    times: Count = 2  # how often each action is applied
    discount: Fraction = 1.0  # of the summed rewards, per step


class ActionRepeat(Wrapper):
    """Applies each action `times` times and sums the rewards up to the end of an episode.

    An env whose episode ends early has been reset by the inner environment; it is reset once more
    at the end (from its own generator), so that its new episode has had no actions yet. `log` is
    that of the last step of the episode; a flag (`success`) is true if it was in any inner step.
    """

    def __init__(self, config: RepeatConfig, env: VecEnv) -> None:
        super().__init__(env, replace(env.spec, dt=env.spec.dt * config.times))
        self.times = config.times
        self.discount = config.discount

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        if self.times == 1:
            return step
        result = replace(step, next_obs=copied(step.next_obs), reward=step.reward.clone())
        late = torch.zeros_like(step.terminated)
        for i in range(1, self.times):
            done = result.ended
            step = self.env.step(action)
            late |= done
            reward = result.reward + self.discount**i * step.reward * ~done
            # `before` in envs that are `done` [B], else `step`.
            log = where(done, result.log, step.log)
            flags = (name for name, each in log.items() if each.dtype == torch.bool)
            log |= {name: result.log[name] | log[name] for name in flags}
            result = Step(
                obs=step.obs,
                next_obs=where(done, result.next_obs, step.next_obs),
                reward=reward,
                terminated=torch.where(done, result.terminated, step.terminated),
                truncated=torch.where(done, result.truncated, step.truncated),
                log=log,
            )
        return replace(result, obs=self.env.reset(mask=late) if late.any() else step.obs)


@dataclass(frozen=True)
class SparseConfig:
    """No settings."""


class SparseSuccess(Wrapper):
    """A benchmark's task with sparse reward, in place of its own reward (Meta-World's goes on after
    success until the time limit). ConfigError where the environment reports no success."""

    def __init__(self, config: SparseConfig, env: VecEnv) -> None:
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
        return self.begun_anew(step, early)
