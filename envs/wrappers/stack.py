"""Wrapped: an environment with a list of wrappers from YAML; helpers for writing wrappers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors, each, where
from embodied.core.wrapper import Wrapper
from embodied.envs.row_rng import RowRng


class EpisodeWrapper(Wrapper):
    """Base class of wrappers of observations whose memory begins anew with every episode."""

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = self.rows(mask)
        if seed is not None:
            self.seed_rows(seed, rows)
        obs = self.env.reset(seed, task, mask)
        self.begin(obs, rows)
        return self.transform_obs(obs)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(self.send(action))
        self.see(step.next_obs)
        following = obs = self.transform_obs(step.next_obs)
        if step.ended.any():
            self.begin(step.obs, step.ended)
            obs = self.transform_obs(step.obs)
        return replace(step, obs=obs, next_obs=following)

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        """Start episodes in `rows` [B] (bool), whose first observations are in `obs`; default:
        there is no memory."""

    def send(self, action: Tensor) -> Tensor:
        """The action that is applied for `action`; default: the same."""
        return action

    def see(self, obs: Tensors) -> None:
        """Take note of the successors of a step; default: nothing."""


class Lags:
    """The delay of each env in whole steps, drawn for every episode from the env's own generator.

    `memory` of the wrapper holds `lag` [B] and the generators [B, 2], both int64.
    """

    def __init__(self, wrapper: Wrapper, low: int, high: int) -> None:
        if not 0 <= low <= high:
            raise ConfigError(
                f"a delay of [{low}, {high}] steps is invalid; it needs 0 <= low <= high"
            )
        self.wrapper = wrapper
        self.low = low
        self.high = high
        # Different wrappers of one environment use different random streams.
        self.streams = RowRng(wrapper.depth << 40, wrapper.num_envs, wrapper.device)
        wrapper.memory["generator"] = self.streams.state
        wrapper.memory["lag"] = torch.full_like(self.streams.state[:, 0], low)

    def seed(self, seed: int, rows: Tensor) -> None:
        """Seed the generators of `rows` [B] (bool)."""
        self.streams.state = self.wrapper.memory["generator"]
        self.streams.seed(seed ^ (self.wrapper.depth << 40), rows.nonzero().flatten())

    def draw(self, rows: Tensor) -> None:
        """Draw delays for the new episodes in `rows` [B] (bool)."""
        memory = self.wrapper.memory
        index = rows.nonzero().flatten()
        self.streams.state = memory["generator"]
        drawn = self.streams.uniform(1, index)[0] * (self.high - self.low + 1)
        # Uniform in (0, 1]: the end itself belongs to the last one.
        memory["lag"][index] = (self.low + drawn.long()).clamp(max=self.high)


class Past:
    """The last `count` values of some leaves of each row, newest first.

    `memory` of the wrapper holds them as `past/<leaf>` [B, count, ...].
    """

    def __init__(self, wrapper: Wrapper, names: tuple[str, ...], count: int) -> None:
        self.wrapper = wrapper
        self.names = names
        self.count = count

    def restart(self, obs: Tensors, rows: Tensor) -> None:
        """Start an episode in `rows` [B] (bool): its first observation fills the whole history."""
        fresh: Tensors = {}
        for name in self.names:
            shape = (-1, self.count, *[-1] * (obs[name].ndim - 1))
            fresh[f"past/{name}"] = obs[name].unsqueeze(1).expand(shape).clone()
        memory = self.wrapper.memory
        old = {key: memory.get(key, value) for key, value in fresh.items()}
        memory.update(where(rows, fresh, old))

    def push(self, obs: Tensors) -> None:
        """Append one step, in all envs."""
        memory = self.wrapper.memory
        for name in self.names:
            old = memory[f"past/{name}"]
            memory[f"past/{name}"] = torch.cat([obs[name].unsqueeze(1), old[:, :-1]], 1)

    def at(self, name: str, lag: Tensor) -> Tensor:
        """The value of `name` from `lag` [B] steps ago."""
        past = self.wrapper.memory[f"past/{name}"]
        return past[torch.arange(len(past), device=past.device), lag]

    def all(self, name: str) -> Tensor:
        """[B, count, ...], oldest first."""
        return self.wrapper.memory[f"past/{name}"].flip(1)


def chosen(spec: Spec, names: tuple[str, ...] | None, who: str) -> tuple[str, ...]:
    """The leaves a wrapper applies to: `names`, or all policy observations (not `critic/` and
    `privileged/`). ConfigError names the nearest leaf if one is unknown.
    """
    for name in names or ():
        if name not in spec.obs:
            raise ConfigError(f'{who}: unknown observation "{name}"{nearest(name, spec.obs)}')
    if names is not None:
        return tuple(names)
    return tuple(k for k in spec.obs if not hidden(k))


@dataclass(frozen=True)
class Config:
    """Settings of an environment in wrappers."""

    env: Node  # node of the inner environment
    wrappers: tuple[Node, ...] = ()  # their nodes, the innermost first
    num_envs: Count = 16  # parallel environments


class Wrapped(Wrapper):
    """`env` inside all `wrappers`; the `_target_` of YAML files in configs/env."""

    def __init__(self, config: Config) -> None:
        env = build(config.env | {"num_envs": config.num_envs}, VecEnv)
        for node in config.wrappers:
            env = build(node, Wrapper, env=env)
        super().__init__(env)


def copied(obs: Tensors) -> Tensors:
    """A copy that later steps cannot change."""
    return each(obs, Tensor.clone)
