"""Gymnasium backend of MiniGrid: any id, any MiniGrid wrapper, exact state.

A plain loop over single environments that observe through `embodied.envs.minigrid.view`.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import torch
from minigrid.minigrid_env import MiniGridEnv
from torch import Tensor

from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.envs.minigrid import state as saved
from embodied.envs.minigrid.describe import described
from embodied.envs.minigrid.factory import Tap, line, make, named_entries, parts, require_stateless
from embodied.envs.minigrid.settings import Config, mission_leaf, privileged, tokens, whole_leaves
from embodied.envs.minigrid.view import View
from embodied.envs.spaces import Actions, replace_rows, row_noise


class Rows(VecEnv):
    """Separate environments; env i is seeded with (seed, i)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.envs = [make(config) for _ in range(config.num_envs)]
        self.worlds: list[MiniGridEnv] = [env.unwrapped for env in self.envs]  # pyright: ignore[reportAttributeAccessIssue]
        self.taps = [next(part for part in parts(env) if type(part) is Tap) for env in self.envs]
        world = self.worlds[0]
        self._actions = Actions(self.envs[0].action_space, config.id)
        self._entries = named_entries(self.envs[0].observation_space, config)
        obs = {entry.name: entry.leaf for entry in self._entries}
        if config.mission_words:
            obs["mission"] = mission_leaf(config)
        if config.privileged:
            obs |= whole_leaves(world.width, world.height)
        names: tuple[str, ...] = getattr(world, "task_names", ())
        task = Leaf((len(names),), low=0.0, high=1.0, names=names) if names else None
        self.spec = Spec(obs, self._actions.leaf, config.dt, task, config.text)
        self._noisy = hasattr(world, "instrs") or config.id.startswith("BabyAI")
        self._seeded = False
        self._now: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None and self.spec.task is None:
            raise ValueError(f"{self.config.id} has no task vector; call reset without `task`")
        if mask is not None and not self._now:
            raise ValueError("the first reset must reset every env; call reset without `mask`")
        rows = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask.numpy())
        if seed is None and not self._seeded:
            seed = self.config.seed
        fresh = self._begin(rows, seed, task)
        self._seeded = True
        self._now = fresh if mask is None else replace_rows(self._now, rows, fresh)
        return self._now

    def step(self, action: Tensor) -> Step:
        native = self._actions.native(action).tolist()
        n = self.num_envs
        reward = np.empty(n, np.float32)
        seen = []
        terminated, truncated, won = np.zeros((3, n), np.bool_)
        for row, env in enumerate(self.envs):
            obs, gain, over, late, _ = env.step(native[row])
            seen.append(obs)
            reward[row] = gain
            terminated[row] = over
            truncated[row] = late and not over
            won[row] = over and self.taps[row].paid
        following = self._tensors(np.arange(n), seen)
        self._now = following
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            self._notify_before_reset(torch.from_numpy(terminated | truncated))
            self._now = replace_rows(following, ended, self._begin(ended, None, None))
        return Step(
            obs=self._now,
            next_obs=following,
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            log={"success": torch.from_numpy(won)},
        )

    def whole(self) -> Tensors:
        """The whole level of every env: `grid`, `agent`."""
        return under(privileged([saved.symbols(world) for world in self.worlds]), "privileged")

    def missions(self) -> list[str]:
        """The mission text of every env."""
        return [world.mission for world in self.worlds]

    @property
    def limit(self) -> int:
        """Steps of an episode at most; 0 where that depends on the mission."""
        return 0 if self._noisy else int(self.worlds[0].max_steps)

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"clock": (0,)}, {"generator": None})

    def get_state(self) -> Tensors:
        if not self._now:
            raise ValueError("call reset() before get_state()")
        require_stateless(self.envs[0], self.config.id)
        rows = [saved.read(world, self.config.id) for world in self.worlds]
        state = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
        return state | {f"obs/{key}": value.clone() for key, value in self._now.items()}

    def set_state(self, state: Tensors) -> Tensors:
        require_stateless(self.envs[0], self.config.id)
        if not self._now:
            self.reset(0)
        arrays = {key: value.numpy() for key, value in state.items() if not key.startswith("obs/")}
        for row, world in enumerate(self.worlds):
            saved.write(world, {key: value[row] for key, value in arrays.items()}, self.config.id)
        self._now = {name: state[f"obs/{name}"].clone() for name in self.spec.obs}
        return self._now

    def picture(self, row: int, tile: int) -> np.ndarray:
        """The level with `tile` pixels a cell, the view lit."""
        return self.worlds[row].get_frame(highlight=True, tile_size=tile)

    def describe(self, row: int = 0) -> str:
        world = self.worlds[row]
        return described(View(world).look(), int(world.agent_dir), world.mission)

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _begin(self, rows: np.ndarray, seed: int | None, task: Tensor | None) -> Tensors:
        seen = []
        # BabyAI prints each rejected level.
        with contextlib.redirect_stdout(io.StringIO()) if self._noisy else contextlib.nullcontext():
            for row in rows:
                options = {} if task is None else {"options": {"task": task[row].numpy()}}
                noise = None if seed is None else row_noise(seed, int(row))
                seen.append(self._first(row, noise, options))
        return self._tensors(rows, seen)

    def _first(self, row: int, seed: int | None, options: dict[str, Any]) -> Any:
        try:
            return self.envs[row].reset(seed=seed, **options)[0]
        except FileNotFoundError as error:
            raise ValueError(
                f"the installed MiniGrid package lacks files of {self.config.id}: "
                f"{error.filename or line(error)}; try backend=envpool"
            ) from error

    def _tensors(self, rows: np.ndarray, seen: list[Any]) -> Tensors:
        obs = {}
        for entry in self._entries:
            values = [entry.pick(one) for one in seen]
            stacked = np.array(values, entry.leaf.dtype)
            if entry.channels_first:
                stacked = np.ascontiguousarray(np.moveaxis(stacked, 1, -1))
            obs[entry.name] = torch.from_numpy(stacked)
        count = self.config.mission_words
        if count:
            words = [tokens(self.worlds[row].mission, count) for row in rows]
            obs["mission"] = torch.from_numpy(np.stack(words))
        if self.config.privileged:
            obs |= privileged([saved.symbols(self.worlds[row]) for row in rows])
        return obs
