"""MiniGrid: MiniGrid and BabyAI grid worlds as a VecEnv, on either of two backends.

Source: MiniGrid (Chevalier-Boisvert et al., 2023), its C++ version in EnvPool (Weng et al., 2022).
The agent observes the 7 x 7 cells in front of it, three symbols per cell. On the same level both
backends give the same observations, actions, rewards and terminations; for the same seed they
generate different levels.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.envs.minigrid.describe import happened
from embodied.envs.minigrid.settings import Config
from embodied.envs.minigrid.subgoals import Guide

if TYPE_CHECKING:
    from embodied.envs.minigrid.envpool_rows import Pool
    from embodied.envs.minigrid.gym_rows import Rows

__all__ = ["Config", "MiniGrid"]


class MiniGrid(VecEnv):
    """MiniGrid as a VecEnv. Observations: `cells` [7, 7, 3] (across, along; the agent in the middle
    of the last row, facing index 0; its own cell holds what it carries), `direction` (east, south,
    west, north) and, if enabled, `mission` and `privileged/*`. Success: the episode ends with a
    reward of the environment itself.

    `get_state` is exact on the Gymnasium backend, except for BabyAI's missions and stateful
    wrappers; EnvPool raises NotSavable.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.backend = chosen(config)
        self.world = _backend(config, self.backend)
        self.spec = self.world.spec

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return self.world.reset(seed, task, mask)

    def step(self, action: Tensor) -> Step:
        return self.world.step(action)

    def whole(self) -> Tensors:
        """The whole level of every env: `grid` [B, W, H, 3] (kind, colour, state of each cell) and
        `agent` [B, 5] (x, y, heading, kind and colour of the carried object).
        """
        return self.world.whole()

    def missions(self) -> list[str]:
        return self.world.missions()

    @property
    def state_roles(self) -> StateRoles:
        return self.world.state_roles

    def get_state(self) -> Tensors:
        return self.world.get_state()

    def set_state(self, state: Tensors) -> Tensors:
        return self.world.set_state(state)

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """Top view of the level, undistorted on a dark background."""
        picture = self.world.picture(row, 32)
        scale = min(width / picture.shape[1], height / picture.shape[0])
        size = (max(1, int(picture.shape[0] * scale)), max(1, int(picture.shape[1] * scale)))
        chw = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float()
        sized = functional.interpolate(chw, size, mode="area")[0].permute(1, 2, 0)
        framed = torch.full((height, width, 3), 24, dtype=torch.uint8)
        top = (height - size[0]) // 2
        left = (width - size[1]) // 2
        framed[top : top + size[0], left : left + size[1]] = sized.round().to(torch.uint8)
        return framed

    def describe(self, row: int = 0) -> str:
        return self.world.describe(row)

    def event_captions(self, before: Tensors, after: Tensors) -> list[str]:
        """One sentence per env for what changed from `before` to `after`; "" if there is none."""
        return happened(before, after)

    def subgoals(self) -> Guide:
        """The subgoals of this environment's levels and their checks."""
        return Guide(self.world.limit, self.world.missions)

    def add_pre_reset_hook(self, call: Callable[[Tensor], None]) -> None:
        self.world.add_pre_reset_hook(call)

    def close(self) -> None:
        self.world.close()


def chosen(config: Config) -> str:
    """The backend for `config`; ValueError if EnvPool lacks what is requested."""
    if config.backend == "gymnasium":
        return "gymnasium"
    plain = not config.wrappers and not config.kwargs
    if config.backend == "auto":
        there = plain and importlib.util.find_spec("envpool") is not None
        return "envpool" if there and config.id in _listed() else "gymnasium"
    if not plain:
        raise ValueError("wrappers and kwargs need backend=gymnasium; EnvPool supports neither")
    if config.id not in _listed():
        near = difflib.get_close_matches(config.id, _listed(), n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else "; try backend=gymnasium"
        raise ValueError(f"EnvPool has no MiniGrid environment {config.id!r}{hint}")
    return "envpool"


def _listed() -> list[str]:
    from embodied.envs.envpool import envpool

    return [i for i in envpool.list_all_envs() if i.startswith(("MiniGrid-", "BabyAI-"))]


def _backend(config: Config, name: str) -> Pool | Rows:
    if name == "envpool":
        from embodied.envs.minigrid.envpool_rows import Pool

        return Pool(config)
    try:
        from embodied.envs.minigrid.gym_rows import Rows
    except ModuleNotFoundError as error:
        if error.name not in ("minigrid", "gymnasium"):
            raise
        raise ModuleNotFoundError(
            "MiniGrid is not installed; type: pip install 'embodied-rl[minigrid]'", name="minigrid"
        ) from error
    return Rows(config)
