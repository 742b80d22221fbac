"""MiniGrid's own environments as rows: any id, any of its wrappers, exact state.

A plain loop over single environments, each looking through `envs.minigrid_view`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import minigrid  # registers MiniGrid's and BabyAI's ids
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from minigrid import wrappers
from minigrid.core.mission import MissionSpace
from minigrid.minigrid_env import MiniGridEnv
from torch import Tensor

from embodied.core.env import NotSavable, Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from envs import minigrid_state as saved
from envs.minigrid_settings import (
    DIRECTION,
    Config,
    cells_leaf,
    mission_leaf,
    privileged,
    whole_leaves,
)
from envs.minigrid_text import described
from envs.minigrid_view import View, attach
from envs.minigrid_words import tokens
from envs.spaces import Actions, Entry, entries, replace_rows, row_noise

__all__ = ["Rows", "minigrid"]

# These leave the picture in MiniGrid's symbols; what others make of it is taken as it comes.
SYMBOLIC = {
    *("FullyObsWrapper", "ViewSizeWrapper", "ImgObsWrapper", "ReseedWrapper", "ActionBonus"),
    *("PositionBonus", "StochasticActionWrapper", "DirectionObsWrapper", "NoDeath"),
}
STATELESS = {
    *("FullyObsWrapper", "ViewSizeWrapper", "ImgObsWrapper", "RGBImgObsWrapper", "NoDeath"),
    *("RGBImgPartialObsWrapper", "OneHotPartialObsWrapper", "SymbolicObsWrapper"),
    *("FlatObsWrapper", "DictObservationSpaceWrapper"),
}


class Tap(gymnasium.Wrapper):
    """Notes whether the world itself paid, below wrappers that change rewards."""

    paid = False

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self.paid = result[1] > 0
        return result


class Rows(VecEnv):
    """Rows are separate environments; row i draws from the seed (seed, i)."""

    def __init__(self, config: Config) -> None:
        self.config, self.num_envs = config, config.num_envs
        self.envs = [make(config) for _ in range(config.num_envs)]
        self.worlds: list[MiniGridEnv] = [env.unwrapped for env in self.envs]  # pyright: ignore[reportAttributeAccessIssue]
        self.taps = [next(part for part in _parts(env) if type(part) is Tap) for env in self.envs]
        world = self.worlds[0]
        self._actions = Actions(self.envs[0].action_space, config.id)
        self._entries = _entries(self.envs[0].observation_space, config)
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
            raise ValueError("the first reset must begin every row; call reset without `mask`")
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
        reward, seen = np.empty(n, np.float32), []
        terminated, truncated, won = np.zeros((3, n), np.bool_)
        for row, env in enumerate(self.envs):
            obs, gain, over, late, _ = env.step(native[row])
            seen.append(obs)
            reward[row], terminated[row], truncated[row] = gain, over, late and not over
            won[row] = over and self.taps[row].paid
        following = self._tensors(np.arange(n), seen)
        self._now = following
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            self._now = replace_rows(following, ended, self._begin(ended, None, None))
        return Step(
            obs=self._now,
            next_obs=following,
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            log={"success": torch.from_numpy(won)},
        )

    def symbols(self) -> dict[str, np.ndarray]:
        """The whole state of every row, as `minigrid_state.symbols` names it, [B, ...]."""
        rows = [saved.symbols(world) for world in self.worlds]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def missions(self) -> list[str]:
        """Every row's mission in words."""
        return [world.mission for world in self.worlds]

    def get_state(self) -> Tensors:
        if not self._now:
            raise ValueError("nothing to save yet; call reset first")
        self._require_stateless()
        rows = [saved.read(world, self.config.id) for world in self.worlds]
        state = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
        return state | {f"obs/{key}": value.clone() for key, value in self._now.items()}

    def set_state(self, state: Tensors) -> Tensors:
        self._require_stateless()
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
        # BabyAI prints each level that it throws away.
        with contextlib.redirect_stdout(io.StringIO()) if self._noisy else contextlib.nullcontext():
            for row in rows:
                options = {} if task is None else {"options": {"task": task[row].numpy()}}
                noise = None if seed is None else row_noise(seed, int(row))
                seen.append(self.envs[row].reset(seed=noise, **options)[0])
        return self._tensors(rows, seen)

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

    def _require_stateless(self) -> None:
        for part in _parts(self.envs[0]):
            name = type(part).__name__
            if isinstance(part, gymnasium.Wrapper) and name not in {*STATELESS, "Tap"}:
                raise NotSavable(f"{self.config.id} cannot save its state: {name} may have one")


def make(config: Config) -> gymnasium.Env:
    """One environment in its wrappers; what is wrong with the configuration is one ValueError."""
    options: dict[str, Any] = {"disable_env_checker": True, **config.kwargs}
    if config.horizon is not None:
        options["max_steps"] = config.horizon
    try:
        env = gymnasium.make(config.id, **options)
    except gymnasium.error.Error as error:
        raise ValueError(f"no MiniGrid environment {config.id!r}: {_line(error)}") from error
    except TypeError as error:
        given = dict(config.kwargs)
        raise ValueError(f"{config.id} does not take kwargs {given}: {_line(error)}") from error
    if not isinstance(env.unwrapped, MiniGridEnv):
        raise ValueError(f"{config.id} is not a MiniGrid world; use env=gymnasium's adapter")
    while type(env) in (OrderEnforcing, PassiveEnvChecker):
        env = env.env
    attach(env.unwrapped)
    env = Tap(env)
    for wrapper in config.wrappers:
        env = _wrapped(env, wrapper)
    return env


def _wrapped(env: gymnasium.Env, wrapper: str | Mapping[str, Any]) -> gymnasium.Env:
    named = {wrapper: {}} if isinstance(wrapper, str) else wrapper
    for name, settings in named.items():
        known = [word for word, part in vars(wrappers).items() if _is_wrapper(part)]
        if name not in known:
            raise ValueError(f"MiniGrid has no wrapper {name!r}; it has {', '.join(sorted(known))}")
        try:
            env = getattr(wrappers, name)(env, **settings)
        except TypeError as error:
            raise ValueError(f"{name} does not take {dict(settings)}: {_line(error)}") from error
    return env


def _is_wrapper(part: Any) -> bool:
    return (
        isinstance(part, type)
        and issubclass(part, gymnasium.Wrapper)
        and part.__module__ == wrappers.__name__
    )


def _entries(space: spaces.Space, config: Config) -> tuple[Entry, ...]:
    """Leaves of the wrapped observation; MiniGrid's own picture and compass are symbols."""
    names = {n for w in config.wrappers for n in ([w] if isinstance(w, str) else w)}
    symbolic = names <= SYMBOLIC
    if isinstance(space, spaces.Dict):
        kept = {k: v for k, v in space.items() if not isinstance(v, MissionSpace)}
        space = spaces.Dict(kept)
    found = []
    for entry in entries(space, "image", config.id):
        if symbolic and entry.path in ((), ("image",)):
            entry = Entry("cells", entry.path, cells_leaf(entry.leaf.shape))
        elif entry.path == ("direction",):
            entry = Entry("direction", entry.path, DIRECTION)
        found.append(entry)
    return tuple(found)


def _parts(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
