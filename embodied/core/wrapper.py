"""Wrapper: a VecEnv around a VecEnv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


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

    @property
    def views(self) -> int:
        return self.env.views

    def photographs(self, rows: Tensor, size: int) -> Tensor:
        return self.env.photographs(rows, size)

    def describe(self, row: int = 0) -> str:
        return self.env.describe(row)

    def before_reset(self, call: Callable[[Tensor], None]) -> None:
        self.env.before_reset(call)

    def leaving(self, rows: Tensor) -> None:
        self.env.leaving(rows)

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
