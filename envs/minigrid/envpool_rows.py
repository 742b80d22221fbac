"""EnvPool backend of MiniGrid: the same observations in C++, many times faster."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.env import Step
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.envs.envpool import Config as PoolConfig
from embodied.envs.envpool import EnvPool, envpool, make
from embodied.envs.minigrid.describe import described
from embodied.envs.minigrid.settings import (
    DIRECTION,
    NOTHING,
    Config,
    cells_leaf,
    mission_leaf,
    tokens,
    whole_leaves,
)
from embodied.envs.spaces import replace_rows


class Pool(EnvPool):
    """Rows of one pool under MiniGrid's names; it cannot save them.

    EnvPool calls an episode that ends by itself on its last step a truncation. So it is given one
    step more, and the clock is ours; only BabyAI's own limits, which depend on the mission, stay
    with it (there a reward in the last step says that the episode ended by itself).
    """

    def __init__(self, config: Config) -> None:
        self.settings = config
        self._limit = config.horizon or _own_limit(config.id)
        pool = PoolConfig(
            config.id,
            config.num_envs,
            config.threads,
            self._limit + 1 if self._limit else None,
            config.dt,
            config.seed,
            text=config.text,
        )
        super().__init__(pool)
        size = self._pool.observation_space["image"].shape[0]
        obs = {"cells": cells_leaf((size, size, 3)), "direction": DIRECTION}
        if config.words:
            obs["mission"] = mission_leaf(config)
        if config.privileged:
            # Width and height of the level, which EnvPool knows once it has made one.
            probe = make(replace(pool, num_envs=1, threads=1), 0)
            probe.reset()
            state = probe.debug_states()[0]
            probe.close()
            obs |= whole_leaves(state.width, state.height)
        self.spec = Spec(obs, self.spec.act, config.dt, None, config.text)
        self._rows = self._every
        self._elapsed = self._keys["elapsed_step"]

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self._rows = self._every if mask is None else np.flatnonzero(mask.numpy()).astype(np.int32)
        return super().reset(seed, task, mask)

    def step(self, action: Tensor) -> Step:
        state = self._played(action)
        reward, terminated, ended = self._rewards(state), *self._ends(state)
        rows = np.flatnonzero(ended).astype(np.int32)
        # The whole level of a finished env must be read before its reset.
        whole = self._whole(self._every) if self.settings.privileged else {}
        if len(rows):
            self._pool._reset(rows)
        following = self._tensors(state, reward) | whole
        self._now = following
        if len(rows):
            self._rows = rows
            self._now = replace_rows(following, rows, self._first_obs())
        return Step(
            obs=self._now,
            next_obs=following,
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(ended & ~terminated),
            log={"success": torch.from_numpy(terminated & (reward > 0))},
        )

    def whole(self) -> Tensors:
        """The whole level of every env: `grid`, `agent`."""
        return under(self._whole(self._every), "privileged")

    def missions(self) -> list[str]:
        return [state.mission for state in self._states(self._every)]

    @property
    def limit(self) -> int:
        """Steps of an episode at most; 0 where that depends on the mission."""
        return self._limit

    def picture(self, row: int, tile: int) -> np.ndarray:
        """The level with `tile` pixels a cell."""
        from minigrid.core.grid import Grid

        state = symbols_of(self._states(np.array([row], np.int32))[0])
        x, y, turn = state["agent"].tolist()
        return Grid.decode(state["grid"])[0].render(tile, (x, y), turn)

    def describe(self, row: int = 0) -> str:
        view = self._now["cells"][row].numpy()
        turn = int(self._now["direction"][row])
        return described(view, turn, self._states(np.array([row], np.int32))[0].mission)

    def _ends(self, state: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Flags of the envs [B] that terminated, and of those that finished (either way)."""
        done = state[self._done]
        if self._limit:
            return done, done | (state[self._elapsed] >= self._limit)
        return done & (~state[self._late] | (state[self._reward] != 0)), done

    def _rewards(self, state: list[np.ndarray]) -> np.ndarray:
        """Rewards [B]: 1 - 0.9 t / T in double precision with our own clock (EnvPool computes it in
        single precision with its own clock).
        """
        reward = state[self._reward]
        rows = np.flatnonzero(reward > 0).astype(np.int32)
        if not len(rows):
            return reward
        steps = state[self._elapsed][rows]
        most = np.array([one.max_steps for one in self._states(rows)])
        known = np.abs(1 - 0.9 * (steps / most) - reward[rows]) < 1e-6
        exact = (1 - 0.9 * (steps / (self._limit or most))).astype(np.float32)
        reward = reward.copy()
        reward[rows] = np.where(known, exact, reward[rows])
        return reward

    def _first_obs(self) -> Tensors:
        fresh = super()._first_obs()  # waits until the rows have begun
        return fresh | self._whole(self._rows) if self.settings.privileged else fresh

    def _tensors(self, state: list[np.ndarray], reward: np.ndarray) -> Tensors:
        obs = {
            "cells": torch.from_numpy(state[self._keys["obs:image"]]),
            "direction": torch.from_numpy(state[self._keys["obs:direction"]].astype(np.int64)),
        }
        if self.settings.words:
            rows = [_mission(row.tobytes()) for row in state[self._keys["obs:mission"]]]
            words = [tokens(mission, self.settings.words) for mission in rows]
            obs["mission"] = torch.from_numpy(np.stack(words))
        return obs

    def _whole(self, rows: np.ndarray) -> Tensors:
        """`privileged/*` of some rows."""
        states = self._states(rows)
        cells = np.frombuffer(b"".join(bytes(state.grid) for state in states), np.uint8)
        grid = cells.reshape(len(states), states[0].width, states[0].height, 3).copy()
        about = [(*s.agent_pos, s.agent_dir, *_hand(s)[:2]) for s in states]
        return {
            "privileged/grid": torch.from_numpy(grid),
            "privileged/agent": torch.tensor(about, dtype=torch.int64),
        }

    def _states(self, rows: np.ndarray) -> list[Any]:
        return self._pool.debug_states(rows)


def symbols_of(state: Any) -> dict[str, np.ndarray]:
    """EnvPool's account of one row as `minigrid_state.symbols` names it, but for the clock."""
    shape = (state.width, state.height, 3)
    inside = np.array(state.grid_contains, np.uint8).reshape(shape)
    hand = [_hand(state), NOTHING]
    if state.carrying_has_contains:
        kind = state.carrying_contains_type
        colour = state.carrying_contains_color
        hand[1] = (kind, colour, state.carrying_contains_state)
    return {
        "grid": np.array(state.grid, np.uint8).reshape(shape),
        "inside": np.where(inside[..., :1] == 0, np.array(NOTHING, np.uint8), inside),
        "agent": np.array([*state.agent_pos, state.agent_dir], np.int64),
        "hand": np.array(hand, np.uint8),
    }


def _hand(state: Any) -> tuple[int, int, int]:
    if not state.has_carrying:
        return NOTHING
    return state.carrying_type, state.carrying_color, state.carrying_state


def _own_limit(name: str) -> int:
    """The steps that a level allows; 0 where they depend on the mission."""
    limit = int(envpool.make_spec(name).config.max_episode_steps)
    return limit if limit < 2**31 - 1 else 0


@lru_cache(maxsize=4096)
def _mission(letters: bytes) -> str:
    return letters.rstrip(b"\0").decode()
