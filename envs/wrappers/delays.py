"""Wrappers for observation delay, action delay and frame stacking.

    observed_t = o_{max(t - d, 0)},      applied_t = a_{t - d}  (before the first: `idle`)

The delay d is in whole control steps, fixed or drawn for each episode from the env's own generator.
Frame stacks as in Mnih et al. (2015).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Number
from embodied.core.build import ConfigError
from embodied.core.env import StateRoles, VecEnv
from embodied.core.spec import Bound, Leaf
from embodied.core.tensors import Tensors
from embodied.envs.wrappers.stack import EpisodeWrapper, Lags, Past, chosen


@dataclass(frozen=True)
class SeeLateConfig:
    """Settings of late observations; the delay is drawn for each episode."""

    low: CountOrZero = 1  # smallest delay in control steps
    high: CountOrZero = 1  # largest delay in control steps
    names: tuple[str, ...] | None = None  # delayed leaves (null: all but privileged ones)


class ObservationDelay(EpisodeWrapper):
    """Delays observations; before the delay has passed, the first observation of the episode is
    returned.
    """

    memory_roles = StateRoles(generators={"generator": None})

    def __init__(self, config: SeeLateConfig, env: VecEnv) -> None:
        super().__init__(env)
        self.lags = Lags(self, config.low, config.high)
        self.past = Past(self, chosen(env.spec, config.names, "ObservationDelay"), config.high + 1)

    def seed_rows(self, seed: int, rows: Tensor) -> None:
        self.lags.seed(seed, rows)

    def see(self, obs: Tensors) -> None:
        self.past.push(obs)

    def transform_obs(self, obs: Tensors) -> Tensors:
        lag = self.memory["lag"]
        return {**obs, **{name: self.past.at(name, lag) for name in self.past.names}}

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        self.lags.draw(rows)
        self.past.restart(obs, rows)


@dataclass(frozen=True)
class ActLateConfig:
    """Settings of late actions; the delay is drawn for each episode.

    `show` adds the leaf `sent` [high * A], newest first, without which the state is not Markov.
    """

    low: CountOrZero = 1  # smallest delay in control steps
    high: CountOrZero = 1  # largest delay in control steps
    idle: Number = 0.0  # action that is applied until the first one arrives
    show: bool = False  # observe the pending actions


class ActionDelay(EpisodeWrapper):
    """Applies each action some steps after it was sent."""

    memory_roles = StateRoles(generators={"generator": None})

    def __init__(self, config: ActLateConfig, env: VecEnv) -> None:
        act = env.spec.act
        spec = env.spec
        if config.show and not act.is_continuous:
            raise ConfigError("ActionDelay: show=true needs continuous actions")
        if config.show and config.high:
            spec = spec.with_obs(sent=Leaf((config.high * act.size,), low=-1.0, high=1.0))
        super().__init__(env, spec)
        self.config = config
        self.lags = Lags(self, config.low, config.high)
        first = act.zeros(self.num_envs, self.device) + config.idle
        self.idle: Tensors = {"action": first.to(getattr(torch, act.dtype))}
        self.past = Past(self, ("action",), config.high + 1)

    def seed_rows(self, seed: int, rows: Tensor) -> None:
        self.lags.seed(seed, rows)

    def send(self, action: Tensor) -> Tensor:
        if self.spec.act.is_continuous:
            action = self.spec.act.bounded(action)  # `sent` shows what will arrive
        self.past.push({"action": action})
        return self.past.at("action", self.memory["lag"])

    def transform_obs(self, obs: Tensors) -> Tensors:
        if "sent" not in self.spec.obs or "sent" in self.env.spec.obs:
            return obs
        return {**obs, "sent": self.memory["past/action"][:, : self.config.high].flatten(1)}

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        self.lags.draw(rows)
        self.past.restart(self.idle, rows)


@dataclass(frozen=True)
class StackConfig:
    """Settings of stacked observations."""

    frames: Count = 3  # last values of a leaf
    names: tuple[str, ...] | None = None  # stacked leaves (null: all but privileged ones)


class FrameStack(EpisodeWrapper):
    """Stacks leaves over time, oldest first: images along channels [H, W, k C], all others as [k,
    ...]. At the start of an episode the first observation is repeated.
    """

    def __init__(self, config: StackConfig, env: VecEnv) -> None:
        names = chosen(env.spec, config.names, "FrameStack")
        leaves = {name: stacked(env.spec.obs[name], config.frames) for name in names}
        super().__init__(env, env.spec.with_obs(**leaves))
        self.past = Past(self, names, config.frames)

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        self.past.restart(obs, rows)

    def see(self, obs: Tensors) -> None:
        self.past.push(obs)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, **{name: self._history(name) for name in self.past.names}}

    def _history(self, name: str) -> Tensor:
        frames = self.past.all(name)
        if not self.env.spec.obs[name].is_image:
            return frames
        return frames.permute(0, 2, 3, 1, 4).flatten(3)


def stacked(leaf: Leaf, count: int) -> Leaf:
    """The leaf of `count` values of `leaf`."""
    if leaf.is_image:
        height, width, channels = leaf.shape
        shape = (height, width, count * channels)
        return replace(leaf, shape=shape, names=(), frames=count * leaf.frames)
    low, high = _repeat_bound(leaf.low, count), _repeat_bound(leaf.high, count)
    return replace(leaf, shape=(count, *leaf.shape), low=low, high=high, names=())


def _repeat_bound(bound: Bound, count: int) -> Bound:
    return bound * count if isinstance(bound, tuple) else bound
