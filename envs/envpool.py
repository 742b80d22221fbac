"""EnvPool: C++ environments (MuJoCo, dm_control, Meta-World, Fetch, MiniGrid) as a VecEnv.

Source: EnvPool (Weng et al., 2022). EnvPool resets one step late: the step after the end of an
episode ignores its action and returns the reset observation. This adapter resets finished envs at
once, so no action is lost and `obs` is always valid to act on.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Positive
from embodied.core.env import Step, VecEnv
from embodied.core.native import (
    Native,
    NativeAction,
    NativeLeaf,
    discrete_action,
    mask_leaf,
    native_action,
    together,
)
from embodied.core.spec import MASK
from embodied.core.tensors import Tensors

try:
    import envpool
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "EnvPool is not installed; type: pip install 'embodied-rl[envpool]'", name="envpool"
    ) from error

from embodied.envs import ENVPOOL_DRAWS
from embodied.envs.row_rng import row_seed
from embodied.envs.spaces import entries, one_line, replace_rows, require_finite_arrays

SUCCESS = ("info:success", "info:is_success", "info:solved")
IDS = ("env_id", "players.env_id")  # what EnvPool wants beside the actions
NO_REWARD = np.zeros(1, np.float32)


@dataclass(frozen=True)
class Config:
    """Settings of an environment of EnvPool."""

    id: str  # as listed by `envpool.list_all_envs()`
    num_envs: Count = 16  # parallel environments
    threads: CountOrZero = 2  # CPU threads (0: EnvPool's default)
    horizon: Count | None = None  # replaces the environment's own time limit (steps)
    dt: Positive = 1.0  # control period, which EnvPool does not report (s)
    seed: CountOrZero = 0  # of the random numbers
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # for `envpool.make`
    obs_key: str = "state"  # name of an observation that has no name of its own
    log: tuple[str, ...] = ()  # entries of EnvPool's info that are added to `Step.log`
    text: str = ""  # task instruction as a sentence


class EnvPool(VecEnv):
    """An EnvPool pool as a VecEnv; env i is seeded with (seed, i).

    EnvPool fixes seeds when a pool is made: `reset(seed=...)` makes a new pool and cannot be
    restricted to some envs. The state cannot be saved: `get_state` raises NotSavable.
    """

    tested = True
    """By the package that they come from: `core.env_contract.is_users`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self._every = np.arange(config.num_envs, dtype=np.int32)
        self._connect(config.seed)
        self._action = _action_of(self._pool, config.id)
        self._entries = entries(self._pool.observation_space, config.obs_key, config.id)
        self._action = together(self._action, self._entries)
        if MASK not in [entry.name for entry in self._entries] and _masks(self._keys):
            self._entries += mask_leaf(sum(self._action.leaf.choices))
        self._slots = [(entry, _slot(self._keys, entry)) for entry in self._entries]
        self.spec = Native(self._entries, self._action).spec(config.dt, config.text)
        self._now: Tensors = {}

    def _connect(self, seed: int) -> None:
        self._pool = make(self.config, seed)
        # The pool's flat lists, without the nesting that EnvPool's own `step` builds each time.
        self._keys = {key: place for place, key in enumerate(self._pool._state_keys)}
        self._done = self._keys["done"]
        self._late = self._keys["trunc"]
        self._reward = self._keys["reward"]
        self._success = [self._keys[key] for key in SUCCESS if key in self._keys]
        self._extra = {name: _extra(self._keys, name, self.config.id) for name in self.config.log}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            raise ValueError(f"{self.config.id} has no task vector; call reset without `task`")
        if mask is not None and (seed is not None or not self._now):
            raise ValueError(
                f"{self.config.id}: EnvPool seeds and first resets all envs together; "
                "call reset without `mask`"
            )
        if seed is not None:
            self._pool.close()
            self._connect(seed)
        rows = self._every if mask is None else np.flatnonzero(mask.numpy()).astype(np.int32)
        if len(rows):
            self._pool._reset(rows)
            fresh = self._first_obs()
            self._now = fresh if mask is None else replace_rows(self._now, rows, fresh)
        return self._now

    def step(self, action: Tensor) -> Step:
        state = self._played(action)
        ended = state[self._done]
        truncated = state[self._late]
        rows = np.flatnonzero(ended).astype(np.int32)
        if len(rows):
            # Finished envs are reset on the pool's threads while this thread continues.
            self._pool._reset(rows)
        following = self._tensors(state, state[self._reward])
        self._now = following
        if len(rows):
            self._now = replace_rows(following, rows, self._first_obs())
        log = {name: torch.from_numpy(state[slot]) for name, slot in self._extra.items()}
        for slot in self._success:
            log["success"] = torch.from_numpy(state[slot] > 0.5)
        return Step(
            obs=self._now,
            next_obs=following,
            reward=torch.from_numpy(state[self._reward]),
            terminated=torch.from_numpy(ended & ~truncated),
            truncated=torch.from_numpy(truncated),
            log=log,
        )

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        if self._pool.render_mode != "rgb_array":
            line = f"{self.config.id} is drawn with env.kwargs.render_mode=rgb_array"
            raise NotImplementedError(line)
        if not ENVPOOL_DRAWS:
            line = "EnvPool draws with EGL (Debian: libegl1), if embodied is imported before it"
            raise NotImplementedError(line)
        camera = self._pool._render_config()[-1]
        drawn = self._pool._render(np.array([row], np.int32), width, height, camera)
        return torch.from_numpy(drawn[0])

    def close(self) -> None:
        self._pool.close()

    def _played(self, action: Tensor) -> list[np.ndarray]:
        """What EnvPool returns of a step of all envs."""
        native = self._action.native(action, self.config.id)
        self._pool._send([self._every, self._every, native])
        return self._pool._recv()

    def _first_obs(self) -> Tensors:
        """First observations; EnvPool leaves the reward slot of a reset unwritten."""
        return self._tensors(self._pool._recv(), NO_REWARD)

    def _tensors(self, state: list[np.ndarray], reward: np.ndarray) -> Tensors:
        """EnvPool's arrays by name, in the dtypes of the spec; NotFinite when one is not."""
        native = {entry.name: state[slot] for entry, slot in self._slots}
        require_finite_arrays(reward, native, self.config.id)
        obs = {}
        for entry, _ in self._slots:
            value = np.ascontiguousarray(entry.converted(native[entry.name]))
            obs[entry.name] = torch.from_numpy(value)
        return obs


def _slot(keys: Mapping[str, int], entry: NativeLeaf) -> int:
    if entry.in_info:
        return _masks(keys)[0]
    # Deeper levels are joined by a dot (dm_control) or by a colon (FrankaKitchen).
    for mark in (".", ":"):
        wanted = "obs:" + mark.join(map(str, entry.path)) if entry.path else "obs"
        if wanted in keys:
            return keys[wanted]
    alone = [place for key, place in keys.items() if key.startswith("obs")]
    if len(alone) != 1:
        raise ValueError(f"EnvPool returns no observation {entry.name}; it returns {sorted(keys)}")
    return alone[0]


def _masks(keys: Mapping[str, int]) -> list[int]:
    """The place of the mask of choices that is in the pool's info, if there is one."""
    return [keys[key] for key in ("info:action_mask", "info:legal_action_mask") if key in keys]


def _extra(keys: Mapping[str, int], name: str, world: str) -> int:
    if f"info:{name}" not in keys:
        known = ", ".join(sorted(key[5:] for key in keys if key.startswith("info:")))
        raise ValueError(f"{world} does not report {name!r}; `log` accepts: {known}")
    return keys[f"info:{name}"]


def make(config: Config, seed: int) -> Any:
    """A pool whose env i is seeded with (seed, i); ValueError if the id or a setting is unknown."""
    if config.id not in envpool.list_all_envs():
        near = difflib.get_close_matches(config.id, envpool.list_all_envs(), n=3, cutoff=0.5)
        similar = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"unknown EnvPool environment {config.id!r}{similar}")
    options = {"num_envs": config.num_envs, "num_threads": config.threads, **config.kwargs}
    if config.horizon is not None:
        options["max_episode_steps"] = config.horizon
    seeds = [row_seed(seed, row) for row in range(config.num_envs)]
    # EnvPool's own spaces lose precision in their bounds, which it reports once per leaf.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            pool = envpool.make(config.id, env_type="gymnasium", seed=seeds, **options)
            _ = pool.observation_space
        except (TypeError, AssertionError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"EnvPool cannot make {config.id} with {options}: {one_line(error)}"
            ) from error
    return pool


def _action_of(pool: Any, name: str) -> NativeAction:
    """The action of each of a pool's envs; ValueError where it is no single array for one player,
    of which EnvPool has none but games of several players."""
    described = pool.spec.action_array_spec
    if tuple(described) != (*IDS, "action"):
        raise ValueError(
            f"{name} takes {', '.join(described)}; an env here has one action of one player"
        )
    spec = described["action"]
    dtype, shape = np.dtype(spec.dtype), tuple(size for size in spec.shape if size != -1)
    ends = (np.asarray(end, dtype) for end in (spec.minimum, spec.maximum))
    low, high = (np.broadcast_to(end, shape) for end in ends)
    if dtype.kind not in "iu":
        return native_action(shape, str(dtype), low, high, name)
    low, high = (end.astype(np.int64) for end in (low, high))
    return discrete_action(low, high - low + 1, str(dtype), shape)
