"""Gymnasium environments in the worker: `settings` has `id`, `kwargs`, `horizon`, `module`."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from .memory import flat_name, is_true

SUCCESS = ("success", "is_success")
MASK = "action_mask"
MASKED = {"dtype": "float32", "low": [0.0], "high": [1.0], "discrete": False}


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
        self.parts = _parts(first.observation_space, ())
        self.act: Any = first.action_space
        self.mask = _mask_size(first.reset()[1], self.parts)
        self.spec = {
            "native": True,  # converted where the environment is used
            "obs": {name: _described(space) for name, (space, _) in self.parts.items()}
            | ({MASK: MASKED | {"shape": [self.mask]}} if self.mask else {}),
            "act": _action(self.act),
            "dt": _period(first),
        }

    def reset(self, arrays: dict[str, Any], rows: Any, seeds: Any, seeded: bool) -> None:
        """Begin an episode in each of `rows`, from its seed."""
        for row, seed in zip(rows, seeds, strict=True):
            obs, info = self.envs[row].reset(seed=int(seed))
            self._write(arrays, "obs", row, obs, info)

    def step(self, arrays: dict[str, Any], rows: Any) -> None:
        """Step each of `rows`; ended ones stay as they are until they are reset."""
        for row in rows:
            obs, reward, over, late, info = self.envs[row].step(self._native(arrays["action"][row]))
            free = {MASK: np.ones(self.mask)}  # nothing is chosen after the last step
            self._write(arrays, "next_obs", row, obs, {**free, **info} if over or late else info)
            arrays["reward"][row] = reward
            arrays["terminated"][row] = over
            arrays["truncated"][row] = late and not over
            for key in SUCCESS:
                if key in info:
                    arrays["success"][row] = is_true(info[key])
                    arrays["success_known"][0] = True

    def _native(self, action: Any) -> Any:
        return int(action) if isinstance(self.act, spaces.Discrete) else action

    def _write(self, arrays: dict[str, Any], kind: str, row: int, obs: Any, info: Any) -> None:
        if self.mask:
            arrays[f"{kind}/{MASK}"][row] = _flat(info[MASK])
        for name, (_, path) in self.parts.items():
            value = obs
            for key in path:
                value = value[key]
            arrays[f"{kind}/{name}"][row] = value


def _parts(space: Any, path: tuple[str, ...]) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Every array of an observation space by name, with its path; one without a name is `state`."""
    if isinstance(space, spaces.Dict):
        parts: dict[str, tuple[Any, tuple[str, ...]]] = {}
        for key, part in space.spaces.items():
            parts.update(_parts(part, (*path, key)))
        return parts
    if not isinstance(space, (spaces.Box, spaces.Discrete)):
        raise ValueError(f"observations of type {type(space).__name__} are not supported")
    return {flat_name(path, "state"): (space, path)}


def _mask_size(info: Any, parts: Any) -> int:
    """How many numbers `action_mask` has in an info; 0 where the info has none."""
    return _flat(info[MASK]).size if MASK in info and MASK not in parts else 0


def _flat(mask: Any) -> Any:
    """A mask of choices, one array or one for each choice, as one vector."""
    each = mask if isinstance(mask, (tuple, list)) else [mask]
    return np.concatenate([np.ravel(part) for part in each])


def _described(space: Any) -> dict[str, Any]:
    if isinstance(space, spaces.Discrete):
        low, high = int(space.start), int(space.start + space.n) - 1
        return {"shape": [], "dtype": "int64", "low": [low], "high": [high], "discrete": True}
    low, high = (_common(end) for end in (space.low, space.high))
    about = {"shape": list(space.shape), "dtype": str(space.dtype), "discrete": False}
    return {**about, "low": low, "high": high}


def _common(bounds: Any) -> Any:
    """The bound of all elements; None where they differ, or it is infinite, which JSON is not."""
    found = np.unique(bounds).tolist()
    return found if len(found) == 1 and np.isfinite(found[0]) else None


def _action(space: Any) -> dict[str, Any]:
    if isinstance(space, spaces.Discrete):
        return _described(space)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        first = np.broadcast_to(getattr(space, "start", 0), space.shape)
        last = first + getattr(space, "nvec", 2) - 1
        ends = {"low": first.flatten().tolist(), "high": last.flatten().tolist()}
        return {"shape": list(space.shape), "dtype": str(space.dtype), **ends, "discrete": True}
    if not isinstance(space, spaces.Box) or not space.is_bounded():
        raise ValueError(
            f"the action space {space} should be a bounded Box, Discrete, MultiDiscrete or "
            "MultiBinary; env=gym takes a Tuple and a Dict too"
        )
    ends = {key: getattr(space, key).flatten().tolist() for key in ("low", "high")}
    return {"shape": list(space.shape), "dtype": str(space.dtype), **ends, "discrete": False}


def _period(env: Any) -> float:
    own = getattr(env.unwrapped, "dt", None)
    rate = env.metadata.get("render_fps")
    return float(own) if isinstance(own, (int, float)) and own > 0 else 1 / rate if rate else 1.0
