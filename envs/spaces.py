"""Conversion between Gymnasium spaces and Leaf: flat observation names, actions in [-1, 1]."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from embodied.core.bounds import Number
from embodied.core.build import require_allowed
from embodied.core.env import NotFinite, require_finite
from embodied.core.errors import ContractError, ContractWarning
from embodied.core.spec import Bound, Leaf
from embodied.core.tensors import Tensors
from embodied.envs.process.worker.memory import flat_name

Ranges = Mapping[str, tuple[Number, Number]]  # lowest and highest value, by name


@dataclass(frozen=True)
class Entry:
    """One observation leaf: its flat `name`, where it lies in a nested observation, its numpy type.

    `channels_first` marks images that arrive as [C, H, W]; they leave as [H, W, C].
    """

    name: str
    path: tuple[str, ...]
    leaf: Leaf
    channels_first: bool = False

    def pick(self, obs: Any) -> Any:
        """This leaf's array in a nested observation."""
        for key in self.path:
            obs = obs[key]
        return obs


def entries(space: spaces.Space, obs_key: str, name: str) -> tuple[Entry, ...]:
    """Every leaf of an observation space; a space without names becomes `obs_key`.

    Texts have no tensor and are left to `VecEnv.describe`. ValueError for spaces that do not fit.
    """
    found = tuple(_walk(space, (), obs_key, name))
    if not found:
        raise ValueError(f"{name}: the observation space {space} has no part that can be a tensor")
    names = [entry.name for entry in found]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ValueError(f"{name}: two observations have the name {', '.join(twice)}")
    return found


def _walk(space: Any, path: tuple[str, ...], obs_key: str, name: str) -> Iterator[Entry]:
    if isinstance(space, spaces.Dict | Mapping):
        for key, part in space.items():
            yield from _walk(part, (*path, key), obs_key, name)
    elif not isinstance(space, spaces.Text):
        leaf, channels_first = _leaf(space, name)
        yield Entry(flat_name(path, obs_key), path, leaf, channels_first)


def _leaf(space: spaces.Space, name: str) -> tuple[Leaf, bool]:
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return Leaf((), "int64", first, first + int(space.n) - 1), False
    if isinstance(space, spaces.MultiBinary):
        return Leaf(tuple(space.shape), "float32", 0.0, 1.0), False
    if not isinstance(space, spaces.Box):
        raise ValueError(
            f"{name}: observations of type {type(space).__name__} are not supported; "
            "wrap the environment so that it returns Box, Discrete or Dict"
        )
    if space.dtype == np.uint8 and len(space.shape) == 3:
        channels_first = space.shape[0] in (1, 3, 4) and space.shape[2] not in (1, 3, 4)
        shape = (*space.shape[1:], space.shape[0]) if channels_first else space.shape
        return Leaf(tuple(shape), "uint8", 0, 255), channels_first
    return Leaf(tuple(space.shape), "float32", _bound(space.low), _bound(space.high)), False


def _bound(values: np.ndarray) -> Bound:
    """One number where all agree, one each otherwise, None where any is without a limit."""
    values = np.asarray(values, dtype=np.float64)
    if not values.size or not np.all((np.abs(values) < 1e30) & (np.abs(values) != _TINY)):
        return None
    if np.all(values == values.flat[0]):
        return float(values.flat[0])
    return tuple(float(value) for value in values.flat)


# Some dm_control specs mistake the smallest positive number for the lowest one.
_TINY = np.finfo(np.float64).tiny


class Actions:
    """The way from policy actions to an environment's own: affine for a Box, as is for Discrete.

    `leaf` is what policies see: float32 [A] in [-1, 1], or int64 from 0 to n - 1. ValueError when
    a bound is infinite (nothing says what 1.0 should mean) or the space is of another kind.
    """

    def __init__(self, space: spaces.Space, name: str) -> None:
        self.discrete = isinstance(space, spaces.Discrete)
        self._name = name
        if isinstance(space, spaces.Discrete):
            self.leaf = Leaf((), "int64", 0, int(space.n) - 1)
            self._start = int(space.start)
            self._dtype = space.dtype or np.dtype(np.int64)
        elif isinstance(space, spaces.Box):
            if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
                raise ValueError(
                    f"{name}: the action space {space} has infinite bounds; "
                    "wrap it in gymnasium.wrappers.RescaleAction or ClipAction with finite ones"
                )
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            self.leaf = Leaf((int(np.prod(space.shape)),), "float32", -1.0, 1.0)
            self._shape = space.shape
            self._dtype = space.dtype or np.dtype(np.float32)
            self._same = bool((low == -1).all() and (high == 1).all())
            self._low, self._high = space.low, space.high
            self._middle = ((low + high) / 2).astype(self._dtype)
            self._half = ((high - low) / 2).astype(self._dtype)
        else:
            raise ValueError(
                f"{name}: actions of type {type(space).__name__} are not supported; "
                "wrap the environment so that they are one Box or Discrete"
            )

    def native(self, action: Tensor) -> np.ndarray:
        """Policy actions [B, A] (or int64 [B]) as the environment's own array [B, *shape].

        Values outside [-1, 1] are clipped, so that the native bounds always hold; NotFinite when
        one is NaN, which simulators would take for zero.
        """
        if self.discrete:
            return action.numpy().astype(self._dtype, copy=False) + self._start
        values = action.detach().numpy()
        if not math.isfinite(values.sum()):
            raise NotFinite(f"{self._name}: the action is not finite; the run stops here")
        # Twice as fast as np.clip on a few numbers.
        values = np.minimum(np.maximum(values, -1.0), 1.0)
        values = values.reshape(-1, *self._shape).astype(self._dtype, copy=False)
        if self._same:
            return values
        return np.clip(self._middle + self._half * values, self._low, self._high)


def space_of(leaf: Leaf) -> spaces.Space:
    """The Gymnasium space of one leaf, in the leaf's own dtype."""
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


def row_noise(seed: int | None, row: int) -> int:
    """The seed of one env: 31 bits that depend on (seed, row) only; a random one if
    `seed` is None.
    """
    entropy = None if seed is None else (seed, row)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


def replace_rows(rows: Tensors, index: np.ndarray, values: Tensors) -> Tensors:
    """A copy of `rows` in which rows `index` [n] are `values` [n, ...]."""
    where = torch.from_numpy(index.astype(np.int64))
    return {key: value.index_copy(0, where, values[key]) for key, value in rows.items()}


RETURNED = "obs, reward, terminated, truncated, info"
PREFIX = "python/"
"""Of ids that stand for objects of a Python program (`embodied.envs.gym`)."""


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
