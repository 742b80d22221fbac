"""An environment's own observations and actions, and the way between them and a Spec's leaves.

A Spec of a foreign environment (Gymnasium, EnvPool, ManiSkill) describes its own side in `native`,
as plain data that is saved with every policy. Adapters, `Agent.predict` and importers convert with
what is here, so that all of them agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.env import NotFinite
from embodied.core.files import MALFORMED, reading
from embodied.core.spec import MASK, SYMBOL, Bound, Leaf, Spec, mixed_leaf
from embodied.core.tensors import Tensors

OBJECT_PREFIX = "python/"  # of ids that stand for objects of a Python program
LARGEST_BOUND = 1e6  # a bound beyond it says "no limit"
CHANNELS = (1, 3, 4)  # of a single picture
MOST_CHANNELS = 32  # of a stack of pictures
SMALLEST_PICTURE = 16  # pixels a side, where the type alone does not tell
# What an array of an observation is, where its type, shape and bounds do not tell.
Kind = Literal["picture", "numbers"]


@dataclass(frozen=True)
class NativeLeaf:
    """One observation: where it lies in a nested observation, and how it becomes the leaf `name`.

    `shape` and numpy `dtype` are its own. Axes are put in the order `axes` (empty: as they are) and
    joined to the leaf's shape; numbers lose `offset` and are multiplied by `scale`. `in_info`: it
    lies in a step's info, not in its observation.
    """

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    leaf: Leaf
    dtype: str = "float32"
    axes: tuple[int, ...] = ()
    scale: float = 1.0
    offset: float = 0
    in_info: bool = False

    @property
    def plain(self) -> bool:
        """Whether the array is copied as it is."""
        rounded = self.leaf.dtype == "uint8" and self.dtype != "uint8"
        return not self.axes and self.scale == 1.0 and self.offset == 0 and not rounded

    def pick(self, obs: Any) -> Any:
        """This observation's array in a nested observation. KeyError, IndexError."""
        return picked(obs, self.path)

    def converted(self, values: Any) -> np.ndarray:
        """Arrays [*batch, *shape] as the leaf's [*batch, *leaf.shape]. ValueError where the shape
        is another one."""
        array = np.asarray(values)
        batch = array.ndim - len(self.shape)
        if batch < 0 or array.shape[batch:] != self.shape:
            raise ValueError(f"{self.name} is {list(array.shape)}, not {list(self.shape)}")
        if self.axes:
            order = (*range(batch), *(batch + axis for axis in self.axes))
            array = array.transpose(order).reshape(*array.shape[:batch], *self.leaf.shape)
        if self.offset:
            array = array - self.offset
        if self.leaf.dtype == "uint8" and array.dtype != np.uint8:
            array = np.rint(np.clip(array * self.scale, 0, 255))
        return array.astype(self.leaf.dtype, copy=False)

    def restored(self, values: np.ndarray) -> np.ndarray:
        """The inverse of `converted` for a batch: the leaf's [n, *leaf.shape] as [n, *shape]."""
        array = values
        if self.axes:
            array = array.reshape(len(array), *(self.shape[axis] for axis in self.axes))
            array = array.transpose(0, *(1 + np.argsort(self.axes)))
        if self.scale != 1.0:
            array = array / self.scale
        if self.offset:
            array = array + self.offset
        if np.dtype(self.dtype).kind in "iu":
            array = np.rint(array)
        return array.astype(self.dtype)


def native_leaf(
    name: str,
    path: Sequence[str | int],
    shape: Sequence[int],
    dtype: str,
    low: Any,
    high: Any,
    kind: Kind | None = None,
) -> NativeLeaf:
    """The leaf of an array of numbers between `low` and `high` (numpy arrays or numbers). Pictures
    become uint8 [H, W, C] whatever the order of their axes; stacked ones have all channels of all
    pictures. Floats in [0, 1] count as a picture where their shape is one, and whatever is said to
    be of that `kind`, whose bounds become 0 and 255; ValueError where it cannot be one."""
    shape, numbers = tuple(int(size) for size in shape), np.dtype(dtype)
    lows, highs = (np.asarray(end, np.float64) for end in (low, high))
    ends = float(lows.min(initial=np.inf)), float(highs.max(initial=-np.inf))
    ends = (0.0, 255.0) if numbers == np.uint8 else ends
    said = kind == "picture"
    axes = None if kind == "numbers" else picture_axes(shape, numbers, ends == (0.0, 1.0), said)
    if said and (axes is None or not ends[0] < ends[1] or max(map(abs, ends)) > LARGEST_BOUND):
        raise ValueError(
            f"{name} is no picture: it is {list(shape)} in [{ends[0]:g}, {ends[1]:g}], and a "
            "picture has two axes, or three or four with channels, and finite bounds"
        )
    if axes is None:
        leaf = Leaf(shape, "float32", bound(low), bound(high))
        return NativeLeaf(name, tuple(path), shape, leaf, str(numbers))
    channels = math.prod(shape[axis] for axis in axes[2:])
    leaf = Leaf((shape[axes[0]], shape[axes[1]], channels), "uint8", 0, 255)
    order, scale = () if axes == (0, 1, 2) else axes, 255.0 / (ends[1] - ends[0])
    return NativeLeaf(name, tuple(path), shape, leaf, str(numbers), order, scale, ends[0])


def discrete_leaf(
    name: str, path: Sequence[str | int], low: Any, high: Any, shape: Sequence[int] = ()
) -> NativeLeaf:
    """The leaf of integers [*shape] from `low` to `high`, several of which are symbols. ValueError
    where those begin with different numbers."""
    shape, firsts = tuple(shape), {*np.ravel(low).tolist()}
    if not shape:
        leaf = Leaf((), "int64", int(low), int(high))
        return NativeLeaf(name, tuple(path), (), leaf, "int64")
    if len(firsts) != 1:
        raise ValueError(f"{name}: symbols that begin with {sorted(firsts)} are not supported")
    first = int(firsts.pop())
    highs = tuple(float(last - first) for last in np.ravel(high))
    leaf = Leaf(shape, "int64", 0, highs, SYMBOL)
    return NativeLeaf(name, tuple(path), shape, leaf, "int64", offset=first)


def picture_axes(
    shape: tuple[int, ...], dtype: np.dtype[Any], unit_range: bool, said: bool = False
) -> tuple[int, ...] | None:
    """The axes of rows, columns and channels of what is a picture, or is `said` to be one; None for
    other arrays. A stack of pictures has two axes of channels. uint8 with three axes is always a
    picture: its channels are last, unless only the first axis could be channels."""
    certain = said or dtype == np.uint8
    if not certain and not (dtype.kind == "f" and unit_range):
        return None
    axes: tuple[int, ...] | None = None
    if len(shape) == 2:
        axes, certain = (0, 1), False
    elif len(shape) == 3:
        first = shape[2] not in CHANNELS and shape[0] == min(shape) and shape[0] <= MOST_CHANNELS
        axes = (1, 2, 0) if first and shape[0] < shape[2] else (0, 1, 2)
    elif len(shape) == 4 and shape[3] in CHANNELS:
        axes = (1, 2, 0, 3)
    elif len(shape) == 4 and shape[1] in CHANNELS:
        axes = (2, 3, 0, 1)
    if axes is None:
        return None
    channels = math.prod(shape[axis] for axis in axes[2:])
    sides = (shape[axes[0]], shape[axes[1]])
    small = min(sides) < SMALLEST_PICTURE or channels > MOST_CHANNELS
    return None if small and not said and not (certain and len(shape) == 3) else axes


def bound(values: Any) -> Bound:
    """One number where all agree, one each otherwise, None where any is without a limit."""
    array = np.asarray(values, dtype=np.float64)
    # Some dm_control specs mistake the smallest positive number for the lowest one.
    tiny = np.finfo(np.float64).tiny
    if not array.size or not np.all((np.abs(array) < 1e30) & (np.abs(array) != tiny)):
        return None
    if np.all(array == array.flat[0]):
        return float(array.flat[0])
    return tuple(float(value) for value in array.flat)


@dataclass(frozen=True)
class NativeAction:
    """An action of `shape` and numpy `dtype` between `low` and `high` (one number each per element,
    in row-major order); `discrete`: integers without an order, which are chosen.

    Policies act in `leaf`: float32 [A] in [-1, 1], affine to the bounds; choices count from 0, and
    a single one is int64 []. `together`: all elements are one choice, of their combinations.
    """

    shape: tuple[int, ...]
    dtype: str
    low: tuple[float, ...]
    high: tuple[float, ...]
    discrete: bool = False
    together: bool = False

    @cached_property
    def leaf(self) -> Leaf:
        if self.together or (self.discrete and not self.shape):
            return Leaf((), "int64", 0, self.classes[0] - 1)
        return mixed_leaf(self.classes)

    @property
    def parts(self) -> tuple[tuple[tuple[str | int, ...], NativeAction], ...]:
        """As `NestedAction.parts`: one part, which is the whole."""
        return (((), self),)

    @property
    def classes(self) -> tuple[int, ...]:
        """Classes of each choice, 0 for a number."""
        return (math.prod(self._counts),) if self.together else self._counts

    @property
    def _counts(self) -> tuple[int, ...]:
        """Classes of each element."""
        ends = zip(self.low, self.high, strict=True)
        return tuple(int(high - low) + 1 if self.discrete else 0 for low, high in ends)

    def native(self, action: Tensor, name: str = "the environment") -> Any:
        """Policy actions [B, A] (or int64 [B]) as the own array [B, *shape] of `name`. Values
        outside [-1, 1] are clipped, so that the native bounds always hold, and integers are
        rounded. NotFinite where one is NaN, which simulators would take for zero."""
        values = action.detach().numpy()
        if not math.isfinite(values.sum()):
            raise NotFinite(f"{name}: the action is not finite; the run stops here")
        low, high, middle, half = self._bounds
        if self.together:
            values = np.stack(np.unravel_index(values, self._counts), 1)
        if self.discrete:
            return (np.rint(values).reshape(-1, *self.shape) + low).astype(self.dtype)
        # Twice as fast as np.clip on a few numbers.
        values = np.minimum(np.maximum(values, -1.0), 1.0).reshape(-1, *self.shape)
        values = values.astype(middle.dtype, copy=False)
        if self._is_unit:
            return values
        values = np.clip(middle + half * values, low, high)
        if np.dtype(self.dtype).kind in "iu":
            return np.rint(values).astype(self.dtype)
        return values

    def one(self, native: Any, row: int) -> Any:
        """The action of env `row` out of those of `native`."""
        return native[row] if self.discrete else native[row, ...]

    def unit(self, native: Any) -> Tensor:
        """The environment's own actions [B, *shape] as policy actions [B, A] (or int64 [B]);
        beyond the bounds they are beyond [-1, 1]."""
        values = np.asarray(native)
        low, high = (np.asarray(end, np.float64) for end in (self.low, self.high))
        flat = values.reshape(len(values), -1).astype(np.float64)
        if self.together:
            each = (flat - low).astype(np.int64)
            joint = np.ravel_multi_index(tuple(each.T), self._counts)
            return torch.from_numpy(joint)  # pyright: ignore[reportUnknownMemberType]
        if self.discrete:
            chosen = torch.from_numpy(flat - low)  # pyright: ignore[reportUnknownMemberType]
            return chosen.float() if self.shape else chosen[:, 0].long()
        half = np.where(high > low, (high - low) / 2, 1.0)
        unit = ((flat - (low + high) / 2) / half).astype(np.float32)
        return torch.from_numpy(unit)  # pyright: ignore[reportUnknownMemberType]

    def mask(self, given: Any) -> NDArray[Any]:
        """A mask of the classes, one array or one for each choice, as [*batch, classes].
        ValueError for another size."""
        parts = cast(Sequence[Any], given)
        several = isinstance(given, tuple | list) and np.ndim(parts[0])
        array: NDArray[Any] = np.concatenate(parts, -1) if several else np.asarray(parts)
        total = sum(self.classes)
        return array if array.shape[-1] == total else array.reshape(*array.shape[:-2], total)

    @cached_property
    def _bounds(self) -> tuple[np.ndarray, ...]:
        """Low, high, their middle and half their distance, in the type of the arithmetic: the
        action's own, or doubles where it is an integer."""
        kind = np.dtype(self.dtype) if np.dtype(self.dtype).kind == "f" else np.dtype(np.float64)
        low, high = (
            np.asarray(end, np.float64).reshape(self.shape) for end in (self.low, self.high)
        )
        return tuple(end.astype(kind) for end in (low, high, (low + high) / 2, (high - low) / 2))

    @cached_property
    def _is_unit(self) -> bool:
        float_kind = np.dtype(self.dtype).kind == "f"
        return float_kind and set(self.low) == {-1.0} and set(self.high) == {1.0}


@dataclass(frozen=True)
class NestedAction:
    """An action of several `parts`, each at a path of keys (of a dict) and places (of a tuple).

    Policies act in one vector `leaf` of the elements of all parts, in their order. Native actions
    of B envs are one nested structure of arrays [B, ...].
    """

    parts: tuple[tuple[tuple[str | int, ...], NativeAction], ...]

    @cached_property
    def leaf(self) -> Leaf:
        classes = tuple(count for _, part in self.parts for count in part.classes)
        named = [("/".join(map(str, path)), len(part.classes)) for path, part in self.parts]
        names = (
            name if size == 1 else f"{name}/{place}"
            for name, size in named
            for place in range(size)
        )
        return mixed_leaf(classes, tuple(names))

    def native(self, action: Tensor, name: str = "the environment") -> Any:
        sizes = [len(part.classes) for _, part in self.parts]
        columns = cast(tuple[Tensor, ...], action.split(sizes, 1))  # pyright: ignore
        return self._nested(
            [part.native(c, name) for (_, part), c in zip(self.parts, columns, strict=True)]
        )

    def one(self, native: Any, row: int) -> Any:
        return self._nested([part.one(picked(native, path), row) for path, part in self.parts])

    def unit(self, native: Any) -> Tensor:
        parts = [part.unit(picked(native, path)) for path, part in self.parts]
        return torch.cat([part.reshape(len(part), -1).float() for part in parts], 1)

    def mask(self, given: Any) -> NDArray[Any]:
        """As `NativeAction.mask`; masks of several parts are nested as the action is."""
        if isinstance(given, np.ndarray):
            return cast(NDArray[Any], given)
        masks = [part.mask(picked(given, path)) for path, part in self.parts if part.discrete]
        return np.concatenate(masks, -1)

    def _nested(self, values: Sequence[Any]) -> Any:
        return nested([(path, value) for (path, _), value in zip(self.parts, values, strict=True)])


def picked(values: Any, path: Sequence[str | int]) -> Any:
    """What lies at `path` of nested mappings and tuples. KeyError, IndexError."""
    for key in path:
        values = values[key]
    return values


def nested(parts: Sequence[tuple[tuple[str | int, ...], Any]]) -> Any:
    """Values by their path as nested dicts (keys) and tuples (places)."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    inside: dict[str | int, list[tuple[tuple[str | int, ...], Any]]] = {}
    for (key, *rest), value in parts:
        inside.setdefault(key, []).append((tuple(rest), value))
    found = {key: nested(below) for key, below in inside.items()}
    return tuple(found.values()) if isinstance(next(iter(found)), int) else found


def native_action(shape: Sequence[int], dtype: str, low: Any, high: Any, name: str) -> NativeAction:
    """The action of a box between `low` and `high`. ValueError where one is infinite: nothing says
    what 1.0 should mean."""
    ends = [np.asarray(end, np.float64).flatten() for end in (low, high)]
    if not all((np.abs(end) <= LARGEST_BOUND).all() for end in ends):
        raise ValueError(
            f"{name}: the action space has infinite bounds; give it finite ones: env = "
            "gymnasium.wrappers.TransformAction(env, lambda action: action, "
            f"gymnasium.spaces.Box(-1, 1, {tuple(shape)}))"
        )
    low, high = (tuple(float(number) for number in end) for end in ends)
    return NativeAction(tuple(shape), str(np.dtype(dtype)), low, high)


def discrete_action(
    first: Any, count: Any, dtype: str = "int64", shape: Sequence[int] = ()
) -> NativeAction:
    """Choices [*shape], each of `count` integers from `first` (numbers, or arrays of them)."""
    low, many = (np.broadcast_to(each, shape).flatten().tolist() for each in (first, count))
    high = tuple(start + size - 1 for start, size in zip(low, many, strict=True))
    return NativeAction(tuple(shape), str(np.dtype(dtype)), tuple(low), high, discrete=True)


def together(
    action: NativeAction | NestedAction, obs: Sequence[NativeLeaf]
) -> NativeAction | NestedAction:
    """`action` as one choice of all combinations, where the mask in `obs` says which of these are
    allowed: its axes are the choices."""
    counts = action.classes if isinstance(action, NativeAction) else ()
    masks = [entry for entry in obs if entry.name == MASK and entry.shape == counts]
    if not masks or math.prod(counts) in (0, sum(counts)):
        return action
    return replace(cast(NativeAction, action), together=True)


def mask_leaf(classes: int) -> tuple[NativeLeaf, ...]:
    """The leaf of the mask of choices that an info holds, `action_mask`; none for no `classes`."""
    leaf = Leaf((classes,), "float32", 0.0, 1.0)
    return (NativeLeaf(MASK, (MASK,), (classes,), leaf, in_info=True),) if classes else ()


@dataclass(frozen=True)
class Native:
    """The foreign side of a Spec."""

    obs: tuple[NativeLeaf, ...]
    act: NativeAction | NestedAction

    @classmethod
    def of(cls, spec: Spec) -> Native | None:
        """The foreign side of `spec`; None where it has none, or its actions are others by now."""
        if not spec.native:
            return None
        with reading("the environment's own side in a Spec", *MALFORMED):
            obs = tuple(map(_leaf, spec.native["obs"]))
            act = _action(spec.native["act"])
        return cls(obs, act) if act.leaf == spec.act else None

    def to_json(self) -> dict[str, Any]:
        obs = [{**vars(entry), "leaf": entry.leaf.to_json()} for entry in self.obs]
        return {"obs": obs, "act": _described(self.act)}

    def spec(self, dt: float, text: str = "") -> Spec:
        """The Spec of this environment, with control period `dt` (s)."""
        obs = {entry.name: entry.leaf for entry in self.obs}
        return Spec(obs, self.act.leaf, dt, text=text, native=self.to_json())

    def tensors(self, obs: Any, names: Sequence[str], info: Any = None) -> tuple[Tensors, bool]:
        """The leaves `names` of one of the environment's own observations and its `info`, or of a
        batch, as tensors [n, ...]; and whether it was a single one. KeyError for one that is not
        there, ValueError for a shape that does not fit."""
        entries = {entry.name: entry for entry in self.obs}
        values = {
            name: np.asarray(
                self.act.mask(info[MASK]) if entries[name].in_info else entries[name].pick(obs)
            )
            for name in names
        }
        single = all(value.ndim == len(entries[name].shape) for name, value in values.items())
        batch: Tensors = {}
        for name, value in values.items():
            rows = np.ascontiguousarray(entries[name].converted(value[None] if single else value))
            batch[name] = torch.from_numpy(rows)  # pyright: ignore[reportUnknownMemberType]
        return batch, single


def _described(action: NativeAction | NestedAction) -> dict[str, Any]:
    if isinstance(action, NestedAction):
        return {"parts": [[path, _described(part)] for path, part in action.parts]}
    fields = ("shape", "dtype", "low", "high", "discrete", "together")
    return {key: getattr(action, key) for key in fields}


def _action(data: dict[str, Any]) -> Any:
    if "parts" in data:
        return NestedAction(tuple((tuple(path), _action(part)) for path, part in data["parts"]))
    return NativeAction(**_tuples(data, "shape", "low", "high"))


def _leaf(data: dict[str, Any]) -> NativeLeaf:
    fields = _tuples(data, "path", "shape", "axes")
    fields["leaf"] = Leaf.from_json(data["leaf"])
    return NativeLeaf(**fields)


def _tuples(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {**data, **{key: tuple(data[key]) for key in keys}}
