"""State serialisation: convert numpy arrays and deques in a state for a checkpoint, and back.

Checkpoints are loaded weights-only: they hold numbers, text, tensors, and lists, tuples and dicts
of these.
"""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

ARRAY, DEQUE = "ndarray", "deque"


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
    """The inverse of `pack`."""
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
