"""Wrappers of time and safety: a time limit, repeated actions, a guard that keeps what went wrong.

    action repeat: r = sum_{i<k} d^i r_i over the k <= n inner steps that the row's episode lasted

(Mnih et al., 2015, repeat each action four times; d = 1 is the plain sum.) To the learner it is one
step of `n dt` seconds, discounted once by its own gamma.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.env import NotFinite, NotSavable, Step, VecEnv, require_finite
from embodied.core.tensors import Tensors, nest, where
from embodied.core.wrapper import Wrapper
from envs.wrappers.stack import copied


@dataclass(frozen=True)
class LimitConfig:
    """`steps` of an episode, after which it is truncated (its value still counts)."""

    steps: int


class TimeLimit(Wrapper):
    """Episodes of at most `steps` steps."""

    def __init__(self, config: LimitConfig, env: VecEnv) -> None:
        super().__init__(env)
        self.steps = _positive(config.steps, "TimeLimit: steps")
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


@dataclass(frozen=True)
class RepeatConfig:
    """`times` that an action is applied; `discount` d of the rewards within."""

    times: int = 2
    discount: float = 1.0


class ActionRepeat(Wrapper):
    """Each action `times` times, rewards summed; a row whose episode ends takes no further part.

    Its new episode, which the inner environment has begun meanwhile, is begun once more at the end
    (from the row's own generator), so that no action of the old one is played in it. `log` is of
    the last step that counts; `success` of any.
    """

    def __init__(self, config: RepeatConfig, env: VecEnv) -> None:
        times = _positive(config.times, "ActionRepeat: times")
        super().__init__(env, replace(env.spec, dt=env.spec.dt * times))
        self.times, self.discount = times, config.discount

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
            result = _later(result, step, done, reward)
        obs = self.env.reset(mask=late) if late.any() else step.obs
        return replace(result, obs=obs)


def _later(before: Step, step: Step, done: Tensor, reward: Tensor) -> Step:
    """`before` in rows that are `done` [B], else `step`."""
    log = where(done, before.log, step.log)
    if "success" in log:
        log["success"] = before.log["success"] | log["success"]
    return Step(
        obs=step.obs,
        next_obs=where(done, before.next_obs, step.next_obs),
        reward=reward,
        terminated=torch.where(done, before.terminated, step.terminated),
        truncated=torch.where(done, before.truncated, step.truncated),
        log=log,
    )


@dataclass(frozen=True)
class GuardConfig:
    """`folder` for the file; `keep`: how many steps back it goes; `states`: with all that
    `get_state` returns (it is asked before every step, which takes time)."""

    folder: str = "outputs/not_finite"
    keep: int = 5
    states: bool = True


class NanGuard(Wrapper):
    """Stops where a number is not finite, and writes down once what led there.

    The .npz has, for each of the last `keep` steps ("0" the step that failed, "1" the one before),
    `<back>/obs/*` and `<back>/action` and, where the environment can save them, `<back>/state/*`;
    `next/*` and `reward` are what came out, if anything did. NotFinite names the file.
    """

    def __init__(self, config: GuardConfig, env: VecEnv) -> None:
        super().__init__(env)
        self.config = config
        self.kept: deque[Tensors] = deque(maxlen=_positive(config.keep, "NanGuard: keep"))
        self.obs: Tensors = {}
        self.written: Path | None = None
        self.savable = config.states

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self.obs = self.env.reset(seed, task, mask)
        return self.obs

    def transform_obs(self, obs: Tensors) -> Tensors:
        self.obs = obs
        return obs

    def step(self, action: Tensor) -> Step:
        self._keep(action)
        out: Tensors = {}
        name = "NanGuard"
        try:
            require_finite(torch.zeros(self.num_envs), {"action": action}, name)
            step = self.env.step(action)
            out = {**nest(step.next_obs, "next"), "reward": step.reward}
            require_finite(step.reward, step.next_obs, name)
            require_finite(step.reward, step.obs, name)
        except NotFinite as error:
            raise NotFinite(
                f"{error}; the last {len(self.kept)} steps are in {self._dump(out)}"
            ) from error
        self.obs = step.obs
        return step

    def _keep(self, action: Tensor) -> None:
        state: Tensors = {}
        if self.savable:
            try:
                state = self.env.get_state()
            except NotSavable:
                self.savable = False
        kept = {**nest(self.obs, "obs"), "action": action, **nest(state, "state")}
        self.kept.append({key: value.detach().cpu().clone() for key, value in kept.items()})

    def _dump(self, out: Tensors) -> Path:
        if self.written is None:
            folder = Path(self.config.folder)
            folder.mkdir(parents=True, exist_ok=True)
            self.written = _free(folder)
            arrays = {key: value.detach().cpu().numpy() for key, value in out.items()}
            for back, kept in enumerate(reversed(self.kept)):
                arrays |= {f"{back}/{key}": value.numpy() for key, value in kept.items()}
            with self.written.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
        return self.written


def _free(folder: Path) -> Path:
    """The first file not_finite_<n>.npz of `folder` that is not there yet."""
    number = 0
    while (file := folder / f"not_finite_{number}.npz").exists():
        number += 1
    return file


def _positive(value: int, what: str) -> int:
    if value < 1:
        raise ConfigError(f"{what}={value} should be at least 1")
    return value
