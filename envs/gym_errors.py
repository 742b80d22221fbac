"""Messages of one line about the id of a user's Gymnasium environment and what it returned."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from embodied.core.build import require_allowed
from embodied.core.errors import ContractError, ContractWarning
from embodied.envs.spaces import Entry

RETURNED = "obs, reward, terminated, truncated, info"
PREFIX = "python/"
"""Of ids that stand for objects of a Python program (`embodied.envs.gym_object`)."""


def require_known_id(name: str, kwargs: Mapping[str, Any]) -> None:
    """ConfigError if `gymnasium.make(name, **kwargs)` would import a module that is not in an
    allowed package; adapters of older versions take another id in `env_id`."""
    for text in (name, str(kwargs.get("env_id", ""))):
        module, colon, _ = text.partition(":")
        if colon:
            require_allowed(module, f"the module of the environment {text}")


def reset_observation(name: str, env: gymnasium.Env[Any, Any], seed: int | None) -> Any:
    """The observation of a reset; ContractError where `reset` is not as in Gymnasium."""
    try:
        result: Any = env.reset(seed=seed)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ContractError(
            f"{name}: {error}: write def reset(self, seed=None, options=None)"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ContractError(f"{name}: reset returned {_what(result)}: write return obs, info")
    return result[0]


def wrong_step(name: str, result: Any) -> ContractError:
    """The message about what `step` returned and could not be stored."""
    if not isinstance(result, tuple) or len(result) != 5:
        return ContractError(f"{name}: step returned {_what(result)}: write return {RETURNED}")
    reward, *flags = result[1:4]
    if np.size(reward) == 1 and np.ndim(reward):
        return ContractError(
            f"{name}: reward is of shape {list(np.shape(reward))}, should be a number: "
            "write reward.item()"
        )
    if np.ndim(reward) or not isinstance(reward, int | float | np.number):
        return ContractError(f"{name}: reward is {_what(reward)}, should be a number")
    shown = ", ".join(map(_what, flags))
    return ContractError(f"{name}: terminated, truncated are {shown}; both should be bool")


def wrong_observation(name: str, leaf: str, shape: Sequence[int], value: Any) -> ContractError:
    """The message about an observation that has not the shape of the declared space."""
    return ContractError(
        f"{name}: the observation {leaf} is {_what(value)}, observation_space says {list(shape)}"
    )


def warn_of_dtypes(name: str, space: Any, entries: Sequence[Entry], obs: Any) -> None:
    """A line for each array in `obs` that is converted, as it has not the type of its Box."""
    for entry in entries:
        box = entry.pick(space)
        value = entry.pick(obs)
        if not isinstance(box, gymnasium.spaces.Box) or not isinstance(value, np.ndarray):
            continue
        if value.dtype != box.dtype:
            warnings.warn(
                f"{name}: the observation {entry.name} is {value.dtype}, observation_space says "
                f"{box.dtype}: write .astype(np.{box.dtype})",
                ContractWarning,
                stacklevel=2,
            )


def _what(value: Any) -> str:
    """`an array [3]`, `4 values`, `None`."""
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)}"
    return "None" if value is None else type(value).__name__
