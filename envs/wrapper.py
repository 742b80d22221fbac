"""Wrapper: a VecEnv around a VecEnv, and the environment that a YAML file stacks out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, where
from envs.streams import Streams


class Wrapper(VecEnv):
    """Everything is the inner environment's; subclasses change what they are for.

    What is not of a VecEnv (`scene`, `parameters`, `batch`) is found on the inner environment too.
    What a wrapper remembers of its rows is in `memory` [B, ...]: it is saved with them, below
    `wrapper<depth>/`, depth 1 the innermost.
    """

    def __init__(self, env: VecEnv, spec: Spec | None = None) -> None:
        self.env = env
        self.spec = env.spec if spec is None else spec
        self.num_envs, self.device = env.num_envs, env.device
        self.depth: int = getattr(env, "depth", 0) + 1
        self.memory: Tensors = {}

    def __getattr__(self, name: str) -> Any:
        # Consulted only for names that are not here; `env` itself is not here before __init__.
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return self.env.reset(seed, task, mask)

    def step(self, action: Tensor) -> Step:
        return self.env.step(action)

    def seen(self, obs: Tensors) -> Tensors:
        """The observations of this environment from those of the inner one, after `set_state`."""
        return obs

    def get_state(self) -> Tensors:
        own = {f"{self._prefix}{key}": value.clone() for key, value in self.memory.items()}
        return {**self.env.get_state(), **own}

    def set_state(self, state: Tensors) -> Tensors:
        inner = {k: v for k, v in state.items() if not k.startswith(self._prefix)}
        self.memory = {
            k.removeprefix(self._prefix): v.to(self.device).clone()
            for k, v in state.items()
            if k.startswith(self._prefix)
        }
        return self.seen(self.env.set_state(inner))

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return self.env.render(row, width, height)

    def describe(self, row: int = 0) -> str:
        return self.env.describe(row)

    def close(self) -> None:
        self.env.close()

    def rows(self, mask: Tensor | None) -> Tensor:
        """`mask` [B] (bool) on this device; None is every row."""
        if mask is None:
            return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return mask.to(self.device, torch.bool)

    @property
    def _prefix(self) -> str:
        return f"wrapper{self.depth}/"


class Lags:
    """How late each row is, in whole steps: drawn for every episode from the row's own generator.

    `memory` of the wrapper holds `lag` [B] and the generators [B, 2], both int64.
    """

    def __init__(self, wrapper: Wrapper, low: int, high: int) -> None:
        if not 0 <= low <= high:
            raise ConfigError(f"a delay from {low} to {high} steps: it needs 0 <= low <= high")
        self.wrapper, self.low, self.high = wrapper, low, high
        # Wrappers around one environment draw apart.
        self.streams = Streams(wrapper.depth << 40, wrapper.num_envs, wrapper.device)
        wrapper.memory["generator"] = self.streams.state
        wrapper.memory["lag"] = torch.full_like(self.streams.state[:, 0], low)

    def seed(self, seed: int, rows: Tensor) -> None:
        """Begin the generators of `rows` [B] (bool) again."""
        self.streams.state = self.wrapper.memory["generator"]
        self.streams.seed(seed ^ (self.wrapper.depth << 40), rows.nonzero().flatten())

    def draw(self, rows: Tensor) -> None:
        """New lags for the episodes that begin in `rows` [B] (bool)."""
        memory, index = self.wrapper.memory, rows.nonzero().flatten()
        self.streams.state = memory["generator"]
        drawn = self.streams.uniform(1, index)[0] * (self.high - self.low + 1)
        # Uniform in (0, 1]: the end itself belongs to the last one.
        memory["lag"][index] = (self.low + drawn.long()).clamp(max=self.high)


class Past:
    """The last `count` values of some leaves of each row, newest first.

    `memory` of the wrapper holds them as `past/<leaf>` [B, count, ...].
    """

    def __init__(self, wrapper: Wrapper, names: tuple[str, ...], count: int) -> None:
        self.wrapper, self.names, self.count = wrapper, names, count

    def restart(self, obs: Tensors, rows: Tensor) -> None:
        """An episode begins in `rows` [B] (bool): its first observation is its whole past."""
        fresh: Tensors = {}
        for name in self.names:
            shape = (-1, self.count, *[-1] * (obs[name].ndim - 1))
            fresh[f"past/{name}"] = obs[name].unsqueeze(1).expand(shape).clone()
        memory = self.wrapper.memory
        old = {key: memory.get(key, value) for key, value in fresh.items()}
        memory.update(where(rows, fresh, old))

    def push(self, obs: Tensors) -> None:
        """One step on, in all rows."""
        memory = self.wrapper.memory
        for name in self.names:
            old = memory[f"past/{name}"]
            memory[f"past/{name}"] = torch.cat([obs[name].unsqueeze(1), old[:, :-1]], 1)

    def at(self, name: str, lag: Tensor) -> Tensor:
        """What `name` was `lag` [B] steps ago."""
        past = self.wrapper.memory[f"past/{name}"]
        return past[torch.arange(len(past), device=past.device), lag]

    def all(self, name: str) -> Tensor:
        """[B, count, ...], oldest first."""
        return self.wrapper.memory[f"past/{name}"].flip(1)


def chosen(spec: Spec, names: tuple[str, ...] | None, who: str) -> tuple[str, ...]:
    """The leaves that a wrapper is about: `names`, or those that policies see (not `critic/` and
    `privileged/`). ConfigError names the nearest leaf where one is not there."""
    for name in names or ():
        if name not in spec.obs:
            raise ConfigError(f'{who}: no observation "{name}"{nearest(name, spec.obs)}')
    if names is not None:
        return tuple(names)
    return tuple(k for k in spec.obs if not k.startswith(("critic/", "privileged/")))


@dataclass(frozen=True)
class Config:
    """`env`: the node of the inner environment; `wrappers`: nodes, the innermost first; `num_envs`
    is the inner environment's."""

    env: Node
    wrappers: tuple[Node, ...] = ()
    num_envs: int = 16


class Wrapped(Wrapper):
    """`env` in all of `wrappers`: what a YAML file in configs/env names."""

    def __init__(self, config: Config) -> None:
        env: VecEnv = build(config.env | {"num_envs": config.num_envs})
        for node in config.wrappers:
            env = build(node, env=env)
        super().__init__(env)


def copied(obs: Tensors) -> Tensors:
    """A copy that later steps cannot change."""
    return each(obs, Tensor.clone)
