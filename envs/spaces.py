"""Conversion between Gymnasium spaces and Leaf: flat observation names, actions in [-1, 1]."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from embodied.core.build import nearest, require_allowed
from embodied.core.env import require_finite
from embodied.core.errors import ContractError, ContractWarning
from embodied.core.native import (
    Kind,
    NativeAction,
    NativeLeaf,
    NestedAction,
    discrete_action,
    discrete_leaf,
    mask_leaf,
    native_action,
    native_leaf,
)
from embodied.core.spec import MASK, Bound, Leaf
from embodied.core.tensors import Tensors
from embodied.envs.process.worker.memory import flat_name, is_true, misfit

NO_KINDS: Mapping[str, Kind] = {}


def entries(
    space: spaces.Space, obs_key: str, name: str, kinds: Mapping[str, Kind] = NO_KINDS
) -> tuple[NativeLeaf, ...]:
    """Every leaf of an observation space; a space without names becomes `obs_key`. `kinds`: of
    those whose space does not tell it.

    Texts have no tensor and are left to `VecEnv.describe`. ValueError for spaces that do not fit.
    """
    found = tuple(_walk(space, (), obs_key, name, kinds))
    if not found:
        raise ValueError(f"{name}: the observation space {space} has no part that can be a tensor")
    names = [entry.name for entry in found]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ValueError(f"{name}: two observations have the name {', '.join(twice)}")
    if wrong := sorted(set(kinds) - set(names)):
        raise ValueError(f"{name}: obs_kind.{wrong[0]} is no observation{nearest(wrong[0], names)}")
    return found


def _walk(
    space: Any, path: tuple[str | int, ...], obs_key: str, name: str, kinds: Mapping[str, Kind]
) -> Iterator[NativeLeaf]:
    if isinstance(space, spaces.Dict | Mapping):
        for key, part in space.items():
            yield from _walk(part, (*path, key), obs_key, name, kinds)
    elif isinstance(space, spaces.Tuple):
        for place, part in enumerate(space.spaces):
            yield from _walk(part, (*path, place), obs_key, name, kinds)
    elif not isinstance(space, spaces.Text):
        named = flat_name(tuple(map(str, path)), obs_key)
        yield _leaf(space, named, path, name, kinds.get(named))


def _leaf(
    space: spaces.Space, named: str, path: tuple[str | int, ...], name: str, kind: Kind | None
) -> NativeLeaf:
    if kind is not None and not isinstance(space, spaces.Box):
        raise ValueError(f"{name}: obs_kind.{named}={kind}, and it is no Box but {space}")
    if isinstance(space, spaces.Discrete):
        return discrete_leaf(named, path, space.start, space.start + space.n - 1)
    if isinstance(space, spaces.MultiBinary):
        shape = tuple(space.shape)
        return NativeLeaf(named, path, shape, Leaf(shape, "float32", 0.0, 1.0), "int8")
    if isinstance(space, spaces.MultiDiscrete):
        return discrete_leaf(named, path, space.start, space.start + space.nvec - 1, space.shape)
    if not isinstance(space, spaces.Box):
        raise ValueError(
            f"{name}: observations of type {type(space).__name__} are not supported; "
            "wrap the environment so that it returns Box, Discrete, Dict or Tuple"
        )
    try:
        return native_leaf(named, path, space.shape, str(space.dtype), space.low, space.high, kind)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def action_of(space: spaces.Space, name: str) -> NativeAction | NestedAction:
    """The environment's own action. ValueError for an infinite bound or another kind of space."""
    if not isinstance(space, spaces.Tuple | spaces.Dict):
        return _array_action_of(space, name)
    parts = tuple(_action_parts(space, (), name))
    if not parts:
        raise ValueError(f"{name}: the action space {space} is empty")
    return NestedAction(parts)


def _array_action_of(space: spaces.Space, name: str) -> NativeAction:
    dtype = str(space.dtype or "int64")
    if isinstance(space, spaces.Discrete):
        return discrete_action(int(space.start), int(space.n), dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return discrete_action(space.start, space.nvec, dtype, space.shape)
    if isinstance(space, spaces.MultiBinary):
        return discrete_action(0, 2, dtype, space.shape)
    if not isinstance(space, spaces.Box):
        raise ValueError(
            f"{name}: actions of type {type(space).__name__} are not supported; wrap the "
            "environment so that they are Box, Discrete, MultiDiscrete, MultiBinary, or a Tuple or "
            "Dict of them"
        )
    return native_action(space.shape, str(space.dtype), space.low, space.high, name)


def _action_parts(
    space: spaces.Space, path: tuple[str | int, ...], name: str
) -> Iterator[tuple[tuple[str | int, ...], NativeAction]]:
    if not isinstance(space, spaces.Tuple | spaces.Dict):
        yield path, _array_action_of(space, name)
        return
    below = space.spaces
    for key, part in below.items() if isinstance(below, Mapping) else enumerate(below):
        yield from _action_parts(part, (*path, key), name)


def space_of(leaf: Leaf) -> spaces.Space:
    """The Gymnasium space of one leaf, in the leaf's own dtype."""
    if leaf.classes:
        if 0 in leaf.classes:
            raise ValueError("an action of choices and numbers is no single Gymnasium space")
        return spaces.MultiDiscrete([*leaf.classes])
    if leaf.dtype == "int64" and not leaf.shape:
        low, high = leaf.low, leaf.high
        if not isinstance(low, int | float) or not isinstance(high, int | float):
            raise ValueError(
                f"a discrete leaf needs a scalar low and a scalar high, got {low} and {high}"
            )
        return spaces.Discrete(int(high - low) + 1, start=int(low))
    dtype = np.dtype(leaf.dtype).type
    low = np.broadcast_to(_or_infinite(leaf.low, -np.inf, leaf), leaf.shape)
    high = np.broadcast_to(_or_infinite(leaf.high, np.inf, leaf), leaf.shape)
    return spaces.Box(low.astype(dtype), high.astype(dtype), leaf.shape, dtype)


def _or_infinite(bound: Bound, infinite: float, leaf: Leaf) -> np.ndarray:
    if bound is None and leaf.dtype == "uint8":
        bound = 0 if infinite < 0 else 255
    values = np.asarray(infinite if bound is None else bound)
    return values.reshape(leaf.shape) if values.size == leaf.size else values


def require_finite_arrays(reward: np.ndarray, arrays: Mapping[str, np.ndarray], name: str) -> None:
    """`core.env.require_finite` for arrays: a sum each, and the exact check where a sum is off.

    At one row numpy's sum costs 1 us and the tensor check about 20 us per leaf.
    """
    values = (reward, *(array for array in arrays.values() if array.dtype.kind == "f"))
    if all(math.isfinite(value.sum()) for value in values):
        return
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    require_finite(torch.from_numpy(reward), tensors, name)


def replace_rows(rows: Tensors, index: np.ndarray, values: Tensors) -> Tensors:
    """A copy of `rows` in which rows `index` [n] are `values` [n, ...]."""
    where = torch.from_numpy(index.astype(np.int64))
    return {key: value.index_copy(0, where, values[key]) for key, value in rows.items()}


RETURNED = "obs, reward, terminated, truncated, info"


def require_known_id(name: str, kwargs: Mapping[str, Any]) -> None:
    """ConfigError if `gymnasium.make(name, **kwargs)` would import a module that is not in an
    allowed package; adapters of older versions take another id in `env_id`."""
    for text in (name, str(kwargs.get("env_id", ""))):
        module, colon, _ = text.partition(":")
        if colon:
            require_allowed(module, f"the module of the environment {text}")


def reset_result(
    name: str, env: gymnasium.Env[Any, Any], seed: int | None, options: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Observation and info of a reset; ContractError where `reset` is not as in Gymnasium."""
    try:
        given = {} if options is None else {"options": options}
        result: Any = env.reset(seed=seed, **given)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ContractError(
            f"{name}: {error}: write def reset(self, seed=None, options=None)"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ContractError(f"{name}: reset returned {_what(result)}: write return obs, info")
    return result


def mask_in_info(info: Any, action: NativeAction | NestedAction) -> tuple[NativeLeaf, ...]:
    """The leaf of the mask of choices that an environment's `info` holds; none where it does not,
    or where there are no choices."""
    size = sum(action.leaf.choices)
    return mask_leaf(size) if MASK in info else ()


def achieved(name: str, value: Any) -> bool:
    """Whether `info["success"]` says yes; ContractError where it says neither yes nor no."""
    try:
        return is_true(value)
    except ValueError as error:
        raise ContractError(
            f'{name}: info["success"] is {_what(value)}: write a bool, or a share from 0 to 1'
        ) from error


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
    return ContractError(
        f"{name}: the observation {leaf} is {_what(value)}, observation_space says {list(shape)}"
    )


def warn_of_dtypes(name: str, space: Any, entries: Sequence[NativeLeaf], obs: Any) -> None:
    """A line for each array in `obs` that is converted, as it has not the type of its Box.
    ContractError where it is declared to have integers and has other numbers."""
    for entry in entries:
        part = entry.pick(space)
        value = entry.pick(obs)
        if wrong := misfit(value, part):
            raise ContractError(f"{name}: the observation {entry.name} {wrong}")
        if not isinstance(part, gymnasium.spaces.Box) or not isinstance(value, np.ndarray):
            continue
        if value.dtype != part.dtype:
            warnings.warn(
                f"{name}: the observation {entry.name} is {value.dtype}, observation_space says "
                f"{part.dtype}: write .astype(np.{part.dtype})",
                ContractWarning,
                stacklevel=2,
            )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _what(value: Any) -> str:
    """`an array [3]`, `4 values`, `None`."""
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)}"
    return "None" if value is None else type(value).__name__
