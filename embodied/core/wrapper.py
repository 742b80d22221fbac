"""Wrapper: base class of environment wrappers (as `gymnasium.Wrapper`); find_protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each

P = TypeVar("P")


class Wrapper(VecEnv):
    """Forwards everything to the inner `env`; subclasses override what they change. Other public
    attributes (`scene`, `parameters`, ...) are looked up on the inner environment too. `memory`
    holds the wrapper's own state per env, leaves [B, ...]. It is saved and restored with the
    environment's state, under `wrapper<depth>/` (depth 1: the innermost wrapper)."""

    hides_terminations: bool = False  # turns those of the inner environment into truncations
    memory_roles: ClassVar[StateRoles] = StateRoles()  # of the leaves of `memory`

    def __init__(self, env: VecEnv, spec: Spec | None = None) -> None:
        self.env = env
        self.spec = env.spec if spec is None else spec
        self.num_envs, self.device = env.num_envs, env.device
        self.depth: int = env.depth + 1 if isinstance(env, Wrapper) else 1
        self.memory: Tensors = {}

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not found; `env` is not set before __init__.
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return self.env.reset(seed, task, mask)

    def step(self, action: Tensor) -> Step:
        return self.env.step(action)

    def transform_obs(self, obs: Tensors) -> Tensors:
        """The wrapper's observations, given the inner environment's; called after `set_state`."""
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
        return self.transform_obs(self.env.set_state(inner))

    @property
    def state_roles(self) -> StateRoles:
        return self.env.state_roles | self.memory_roles.under(self._prefix)

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return self.env.render(row, width, height)

    @property
    def num_views(self) -> int:
        return self.env.num_views

    def render_batch(self, rows: Tensor, size: int) -> Tensor:
        return self.env.render_batch(rows, size)

    def describe(self, row: int = 0) -> str:
        return self.env.describe(row)

    def add_pre_reset_hook(self, call: Callable[[Tensor], None]) -> None:
        self.env.add_pre_reset_hook(call)

    def _notify_before_reset(self, rows: Tensor) -> None:
        self.env._notify_before_reset(rows)

    def seed_rows(self, seed: int, rows: Tensor) -> None:
        """Seed the generators of `rows` [B] (bool), if there are any."""
        if "generator" in self.memory:
            self.streams.state = self.memory["generator"]
            self.streams.seed(seed ^ (self.depth << 40), rows.nonzero().flatten())

    def begun_anew(self, step: Step, rows: Tensor) -> Step:
        """`step`, after the envs `rows` [B] (bool), whose inner episodes go on, were reset."""
        if not rows.any():
            return step
        following = each(step.next_obs, Tensor.clone)
        self._notify_before_reset(rows)
        return replace(step, obs=self.env.reset(mask=rows), next_obs=following)

    def close(self) -> None:
        self.env.close()

    def rows(self, mask: Tensor | None) -> Tensor:
        """`mask` [B] as bool on this device; None selects all envs."""
        if mask is None:
            return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return mask.to(self.device, torch.bool)

    @property
    def _prefix(self) -> str:
        return f"wrapper{self.depth}/"


def find_protocol(env: VecEnv, protocol: type[P]) -> P | None:
    """`env` or the outermost environment inside its wrappers that implements `protocol`, or None.
    `protocol` is one of `core.env`, for example `HasLevels`."""
    while not isinstance(env, protocol):
        if not isinstance(env, Wrapper):
            return None
        env = env.env
    return env
