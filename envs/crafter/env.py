"""Crafter: open-world survival game with 22 achievements, as a VecEnv (Hafner, 2021).

A reimplementation with exactly the rules and maps of the `crafter` package. It generates a map in
milliseconds and renders only if images are observed. The score of a run is

    S = exp(1/22 sum_i ln(1 + s_i)) - 1,   s_i the success rate of achievement i in percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, nearest
from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.crafter.picture import Kind, leaves
from embodied.envs.crafter.pool import Pool, Settings
from embodied.envs.crafter.rules import ACHIEVEMENTS, ACTIONS, happened
from embodied.envs.row_rng import row_seed

TASK = "survive, and unlock as many of the 22 achievements as you can"


@dataclass(frozen=True)
class Config:
    """Settings of Crafter.

    `observe`: "symbols" (the 7 x 9 cells in view, facing direction, daylight), "inventory" (16
    counts), "image" (64 x 64 x 3; rendered only if listed).
    """

    num_envs: Count = 16  # parallel environments
    workers: CountOrZero = 2  # worker processes (0: none)
    observe: tuple[Kind, ...] = ("symbols", "inventory")  # symbols, inventory, image
    length: Count = 10000  # time limit in steps
    goal: str | None = None  # achievement that is success and ends the episode (null: none)
    text: str = TASK  # task instruction as a sentence


class Crafter(VecEnv):
    """Crafter as a VecEnv with the package's 17 actions and reward.

    Reward: 1 for each newly unlocked achievement, and a tenth of each change of health. An episode
    ends with the player's death. Env i plays the episodes of the package's environment with a seed
    from (seed, i), one after the other. `log` has `achievement/<name>` (bool, unlocked in this
    episode) and, with a goal, `success`. `get_state` is exact, random generators included.
    """

    def __init__(self, config: Config) -> None:
        if not config.observe or len(set(config.observe)) < len(config.observe):
            raise ConfigError(
                f"observe={list(config.observe)} must not be empty or contain duplicates"
            )
        if config.goal is not None and config.goal not in ACHIEVEMENTS:
            raise ConfigError(
                f"unknown achievement {config.goal!r}{nearest(config.goal, ACHIEVEMENTS)}"
            )
        self.config = config
        self.num_envs = config.num_envs
        goal = -1 if config.goal is None else ACHIEVEMENTS.index(config.goal)
        self._knows_success = goal >= 0
        self._goal = goal
        self._pool = Pool(
            config.num_envs, config.workers, Settings(config.length, goal, config.observe)
        )
        self.spec = Spec(
            obs=leaves(config.observe),
            act=Leaf((), "int64", 0, len(ACTIONS) - 1),
            dt=1.0,
            text=config.text,
        )
        self._now: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            raise ValueError("Crafter has no task vector; call reset without `task`")
        if mask is not None and not self._now:
            raise ValueError("the first reset must reset every env; call reset without `mask`")
        rows = range(self.num_envs) if mask is None else mask.nonzero().flatten().tolist()
        going_on = seed is None and bool(self._now)
        self._pool.reset({row: None if going_on else row_seed(seed, row) for row in rows})
        began = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        self._now = self._with_first_obs(self._now, began)
        return self._now

    def step(self, action: Tensor) -> Step:
        if not self._now:
            raise ValueError("call reset() before step()")
        arrays = self._pool.arrays
        arrays["action"][:] = action.numpy()
        if arrays["action"].min() < 0 or arrays["action"].max() >= len(ACTIONS):
            raise ValueError(f"actions must be 0 to {len(ACTIONS) - 1}, got {action.tolist()}")
        self._pool.step()
        following = {name: _copied(arrays[f"next/{name}"]) for name in self.spec.obs}
        terminated, truncated = _copied(arrays["terminated"]), _copied(arrays["truncated"])
        ended = terminated | truncated
        self._now = self._with_first_obs(following, ended) if ended.any() else following
        unlocked = _copied(arrays["unlocked"])
        named = zip(ACHIEVEMENTS, unlocked.unbind(1), strict=True)
        log = {f"achievement/{name}": flags for name, flags in named}
        if self._knows_success:
            log["success"] = unlocked[:, self._goal]
        return Step(
            obs=self._now,
            next_obs=following,
            reward=_copied(arrays["reward"]),
            terminated=terminated,
            truncated=truncated,
            log=log,
        )

    def _with_first_obs(self, before: Tensors, began: Tensor) -> Tensors:
        """`before`, with the first observations of new episodes in the finished envs."""
        start = {name: _copied(self._pool.arrays[f"obs/{name}"]) for name in self.spec.obs}
        return tt.where(began, start, before) if before else start

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"generator": None, "numbers": (0, 1)})

    def get_state(self) -> Tensors:
        if not self._now:
            raise ValueError("call reset() before get_state()")
        world = {key: torch.from_numpy(value) for key, value in self._pool.read().items()}
        # The noise of a night image cannot be drawn again from the generator.
        return world | {f"obs/{name}": value.clone() for name, value in self._now.items()}

    def set_state(self, state: Tensors) -> Tensors:
        self._pool.write({k: v.numpy() for k, v in state.items() if not k.startswith("obs/")})
        self._now = {name: state[f"obs/{name}"].clone() for name in self.spec.obs}
        return self._now

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return torch.from_numpy(self._pool.ask("draw", row, width, height))

    def describe(self, row: int = 0) -> str:
        return self._pool.ask("tell", row)

    def event_captions(self, before: Tensors, after: Tensors) -> list[str]:
        """One sentence per env for what changed from `before` to `after`; "" if there is none."""
        return happened(before, after)

    def close(self) -> None:
        self._pool.close()


def score(successes: Tensor) -> float:
    """Crafter score in percent from the unlocked achievements of episodes [N, 22] (bool or 0/1)."""
    return math.exp(torch.log1p(100 * successes.double().mean(0)).mean().item()) - 1


def _copied(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy())
