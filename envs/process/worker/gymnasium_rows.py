"""Gymnasium environments in the worker: `settings` has `id`, `kwargs`, `horizon`, `module`."""

from __future__ import annotations

import importlib
import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from .memory import flat_name

SUCCESS = ("success", "is_success")


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
        # Images that come as [C, H, W] leave as [H, W, C].
        self.turned = {name for name, (space, _) in self.parts.items() if _channels_first(space)}
        self.act: Any = first.action_space
        self.spec = {
            "obs": {name: _leaf(space) for name, (space, _) in self.parts.items()},
            "act": _action(self.act),
            "dt": _period(first),
        }

    def reset(self, arrays: dict[str, Any], rows: Any, seeds: Any, seeded: bool) -> None:
        """Begin an episode in each of `rows`, from its seed."""
        for row, seed in zip(rows, seeds, strict=True):
            obs, _ = self.envs[row].reset(seed=int(seed))
            self._write(arrays, "obs", row, obs)

    def step(self, arrays: dict[str, Any], rows: Any) -> None:
        """Step each of `rows`; ended ones stay as they are until they are reset."""
        for row in rows:
            obs, reward, over, late, info = self.envs[row].step(self._native(arrays["action"][row]))
            self._write(arrays, "next_obs", row, obs)
            arrays["reward"][row] = reward
            arrays["terminated"][row] = over
            arrays["truncated"][row] = late and not over
            for key in SUCCESS:
                if key in info:
                    arrays["success"][row] = info[key]
                    arrays["success_known"][0] = True

    def _native(self, action: Any) -> Any:
        if isinstance(self.act, spaces.Discrete):
            return int(action) + int(self.act.start)
        low, high = self.act.low.astype(np.float64), self.act.high.astype(np.float64)
        value = (low + high) / 2 + (high - low) / 2 * np.clip(action, -1, 1).reshape(low.shape)
        return np.clip(value.astype(self.act.dtype), self.act.low, self.act.high)

    def _write(self, arrays: dict[str, Any], kind: str, row: int, obs: Any) -> None:
        for name, (_, path) in self.parts.items():
            value = obs
            for key in path:
                value = value[key]
            arrays[f"{kind}/{name}"][row] = (
                np.moveaxis(value, 0, -1) if name in self.turned else value
            )


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


def _leaf(space: Any) -> dict[str, Any]:
    if isinstance(space, spaces.Discrete):
        return _described((), "int64", int(space.start), int(space.start + space.n) - 1)
    if _is_image(space):
        shape = (*space.shape[1:], space.shape[0]) if _channels_first(space) else space.shape
        return _described(shape, "uint8", 0, 255)
    return _described(space.shape, "float32", None, None)


def _is_image(space: Any) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def _channels_first(space: Any) -> bool:
    return _is_image(space) and space.shape[0] in (1, 3, 4) and space.shape[2] not in (1, 3, 4)


def _action(space: Any) -> dict[str, Any]:
    if isinstance(space, spaces.Discrete):
        return _described((), "int64", 0, int(space.n) - 1)
    if not isinstance(space, spaces.Box) or not space.is_bounded():
        raise ValueError(f"the action space {space} should be a bounded Box or Discrete")
    return _described((math.prod(space.shape),), "float32", -1.0, 1.0)


def _described(shape: Any, dtype: str, low: Any, high: Any) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, "low": low, "high": high}


def _period(env: Any) -> float:
    own = getattr(env.unwrapped, "dt", None)
    rate = env.metadata.get("render_fps")
    return float(own) if isinstance(own, (int, float)) and own > 0 else 1 / rate if rate else 1.0
