"""Remembered: an object whose state is the attributes that its classes name."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, deque
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ARRAY, DEQUE = "ndarray", "deque"  # keys of what cannot be loaded weights-only


def pack(value: Any) -> Any:
    """`value` with numpy arrays and deques converted; TypeError for types that a checkpoint cannot
    hold."""
    if isinstance(value, np.ndarray):
        array = cast(NDArray[Any], value)
        return {ARRAY: torch.tensor(np.ascontiguousarray(array).reshape(array.shape))}
    if isinstance(value, np.generic):
        return cast(Any, value).item()
    if isinstance(value, deque):
        queue = cast(deque[Any], value)
        return {DEQUE: [pack(each) for each in queue], "maxlen": queue.maxlen}
    if isinstance(value, dict):
        return {key: pack(each) for key, each in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        return [pack(each) for each in cast(list[Any], value)]
    if isinstance(value, tuple):
        return tuple(pack(each) for each in cast(tuple[Any, ...], value))
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def unpack(value: Any) -> Any:
    if isinstance(value, dict):
        kept = cast(dict[Any, Any], value)
        if set(kept) == {ARRAY}:
            return kept[ARRAY].numpy()
        if set(kept) == {DEQUE, "maxlen"}:
            return deque(unpack(kept[DEQUE]), maxlen=kept["maxlen"])
        return {key: unpack(each) for key, each in kept.items()}
    if isinstance(value, list):
        return [unpack(each) for each in cast(list[Any], value)]
    if isinstance(value, tuple):
        return tuple(unpack(each) for each in cast(tuple[Any, ...], value))
    return value


class Remembered:
    """Saves and restores the attributes named in `remembered`, so that a run resumes exactly. An
    attribute is a number, a text, a tensor, an array, a dataclass, a list, a deque or a dict of
    these; or a module, an optimiser, a random generator or an object with `get_state` and
    `set_state`, by itself or in a dict."""

    remembered: ClassVar[tuple[str, ...]] = ()  # besides those that the base classes name

    def get_state(self) -> dict[str, Any]:
        return {name: _saved(getattr(self, name)) for name in _names(type(self))}

    def set_state(self, state: dict[str, Any]) -> None:
        for name in _names(type(self)):
            setattr(self, name, _restored(getattr(self, name), state[name]))


def _names(kind: type) -> list[str]:
    """The attributes that `kind` and its bases name, each once."""
    named = (vars(each).get("remembered", ()) for each in reversed(kind.__mro__))
    return list(dict.fromkeys(name for names in named for name in names))


def _saved(value: Any) -> Any:
    if hasattr(value, "load_state_dict"):
        return copy.deepcopy(value.state_dict())
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if hasattr(value, "get_state"):  # torch.Generator has it, too
        return value.get_state()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _saved(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if parts := _parts(value):
        return {key: _saved(part) for key, part in parts.items()}
    return copy.deepcopy(pack(value))


def _restored(current: Any, saved: Any) -> Any:
    """`saved` as the value of an attribute, which is `current` so far."""
    if hasattr(current, "load_state_dict"):
        current.load_state_dict(copy.deepcopy(saved))
        return current
    if isinstance(current, np.random.Generator):
        current.bit_generator.state = saved
        return current
    if hasattr(current, "set_state"):
        current.set_state(saved.cpu() if isinstance(current, torch.Generator) else saved)
        return current
    if dataclasses.is_dataclass(current) and not isinstance(current, type):
        return type(current)(**unpack(copy.deepcopy(saved)))
    if parts := _parts(current):
        return {key: _restored(part, saved[key]) for key, part in parts.items()}
    value = unpack(copy.deepcopy(saved))
    if isinstance(current, Counter):
        return Counter(cast(dict[Any, int], value))
    return value.to(current.device) if isinstance(current, Tensor) else value


def _parts(value: Any) -> dict[Any, Any]:
    """`value` if it is a dict of objects that have a state of their own, else {}."""
    if not isinstance(value, dict):
        return {}
    parts = cast(dict[Any, Any], value)
    held = (hasattr(part, "get_state") or hasattr(part, "state_dict") for part in parts.values())
    return parts if any(held) else {}
