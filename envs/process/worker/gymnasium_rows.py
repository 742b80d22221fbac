"""Gymnasium environments in the worker: `settings` has `id`, `kwargs`, `horizon`, `module`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from .memory import flat_name, is_true, misfit

SUCCESS = ("success", "is_success")
MASK = "action_mask"
MOST_BOUNDS = 4096  # of one observation, in an answer


class Rows:
    """`count` separate environments; any of them can be stepped without the others."""

    partial = True

    def __init__(self, settings: dict[str, Any], count: int) -> None:
        if settings["module"]:
            importlib.import_module(settings["module"])
        options = {"disable_env_checker": True, **settings["kwargs"]}
        if settings["horizon"] is not None:
            options["max_episode_steps"] = settings["horizon"]
        self.envs = [gymnasium.make(settings["id"], **options) for _ in range(count)]
        first = self.envs[0]
        self.parts = _parts(first.observation_space)
        self.act: Any = first.action_space
        self.actions = list(_arrays(self.act, ()))
        obs, info = first.reset()
        for name, (space, path) in self.parts.items():
            if wrong := misfit(_picked(obs, path), space):
                raise ValueError(f"the observation {name} {wrong}")
        # How many numbers `action_mask` has in an info; 0 where the info has none.
        known = MASK in info and MASK not in self.parts and _chooses(self.act)
        self.mask = _flat(info[MASK], self.act).size if known else 0
        self.spec = {
            "native": True,  # converted where the environment is used
            "obs": {name: _observed(space, path) for name, (space, path) in self.parts.items()},
            "mask": self.mask,
            "act": [[path, _action(space)] for path, space in self.actions],
            "dt": _period(first),
        }

    def reset(self, arrays: dict[str, Any], rows: Any, seeds: Any, seeded: bool) -> None:
        """Begin an episode in each of `rows`, from its seed."""
        for row, seed in zip(rows, seeds, strict=True):
            obs, info = self.envs[row].reset(seed=int(seed))
            self._write(arrays, "obs", row, obs, info)

    def step(self, arrays: dict[str, Any], rows: Any) -> None:
        """Step each of `rows`; ended ones stay as they are until they are reset."""
        names = [f"action/{place}" for place in range(len(self.actions))]
        for row in rows:
            # Copies: an environment may keep its action, and the memory is used again.
            action = _built(self.act, iter([np.array(arrays[name][row]) for name in names]))
            obs, reward, over, late, info = self.envs[row].step(action)
            free = {MASK: np.ones(self.mask)}  # nothing is chosen after the last step
            self._write(arrays, "next_obs", row, obs, {**free, **info} if over or late else info)
            arrays["reward"][row] = reward
            arrays["terminated"][row] = over
            arrays["truncated"][row] = late and not over
            successes = [is_true(info[key]) for key in SUCCESS if key in info]
            arrays["success"][row] = bool(successes) and successes[-1]
            arrays["success_known"][0] |= bool(successes)

    def _write(self, arrays: dict[str, Any], kind: str, row: int, obs: Any, info: Any) -> None:
        if self.mask:
            arrays[f"{kind}/{MASK}"][row] = _flat(info[MASK], self.act)
        for name, (_, path) in self.parts.items():
            arrays[f"{kind}/{name}"][row] = _picked(obs, path)


def _picked(obs: Any, path: tuple[Any, ...]) -> Any:
    """What lies at `path` of nested observations."""
    for key in path:
        obs = obs[key]
    return obs


def _parts(space: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every array of an observation space by name, with its path; one without a name is `state`,
    and texts are left out."""
    parts: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for path, part in _arrays(space, ()):
        if not isinstance(part, spaces.Text):
            name = flat_name(tuple(map(str, path)), "state")
            if name in parts:
                raise ValueError(f"two observations have the name {name}")
            parts[name] = (part, path)
    return parts


def _arrays(space: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for key, part in _children(space):
            yield from _arrays(part, (*path, key))
    else:
        yield path, space


def _children(space: Any) -> Any:
    return space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)


def _built(space: Any, values: Iterator[Any]) -> Any:
    """An action of `space` from its arrays in the order of `_arrays`."""
    if isinstance(space, spaces.Dict):
        return {key: _built(part, values) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_built(part, values) for part in space.spaces)
    value = next(values)
    return int(value) if isinstance(space, spaces.Discrete) else value


def _chooses(space: Any) -> bool:
    """Whether an action of `space` has choices."""
    return any(not isinstance(part, spaces.Box) for _, part in _arrays(space, ()))


def _flat(mask: Any, space: Any) -> Any:
    """A mask of the choices of `space`, nested as the action is, one array or one for each choice,
    as one vector."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)) and not isinstance(mask, np.ndarray):
        return np.concatenate(
            [_flat(mask[key], part) for key, part in _children(space) if _chooses(part)]
        )
    each = mask if isinstance(mask, (tuple, list)) else [mask]
    return np.concatenate([np.ravel(part) for part in each])


def _observed(space: Any, path: tuple[Any, ...]) -> dict[str, Any]:
    known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, known):
        raise ValueError(f"observations of type {type(space).__name__} are not supported")
    numbers = {"discrete": False} if isinstance(space, spaces.MultiBinary) else {}
    return {**_described(space), **numbers, "path": path}


def _action(space: Any) -> dict[str, Any]:
    known = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, known) and not (isinstance(space, spaces.Box) and space.is_bounded()):
        raise ValueError(
            f"the action space {space} should be a bounded Box, Discrete, MultiDiscrete, "
            "MultiBinary, or a Tuple or Dict of them"
        )
    return _described(space)


def _described(space: Any) -> dict[str, Any]:
    """Shape, type, and the bounds: one of all elements, or one each."""
    about: dict[str, Any] = {"shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Box):
        ends = {"low": _bounds(space.low), "high": _bounds(space.high)}
        return {**about, **ends, "discrete": False}
    count = space.n if isinstance(space, spaces.Discrete) else getattr(space, "nvec", 2)
    first: Any = np.broadcast_to(getattr(space, "start", 0), about["shape"])
    last = first + count - 1
    return {**about, "low": first.ravel().tolist(), "high": last.ravel().tolist(), "discrete": True}


def _bounds(values: Any) -> Any:
    """None where one is infinite, which JSON is not, or where there are too many of them."""
    found = np.unique(values)
    if not np.isfinite(found).all() or (found.size > 1 and values.size > MOST_BOUNDS):
        return None
    return found.tolist() if found.size == 1 else values.ravel().tolist()


def _period(env: Any) -> float:
    own = getattr(env.unwrapped, "dt", None)
    rate = env.metadata.get("render_fps")
    return float(own) if isinstance(own, (int, float)) and own > 0 else 1 / rate if rate else 1.0
