"""Plain: states with numpy arrays in them, as what a checkpoint may hold, and back.

Checkpoints are loaded with weights only: numbers, text, tensors, and lists, tuples and dictionaries
of these.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

ARRAY, DEQUE = "ndarray", "deque"


def pack(value: Any) -> Any:
    """`value` without numpy arrays and deques; TypeError for what a checkpoint cannot hold."""
    if isinstance(value, np.ndarray):
        return {ARRAY: torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, deque):
        return {DEQUE: [pack(each) for each in value], "maxlen": value.maxlen}
    if isinstance(value, dict):
        return {key: pack(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(pack(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def unpack(value: Any) -> Any:
    """What `pack` was given."""
    if isinstance(value, dict):
        if set(value) == {ARRAY}:
            return value[ARRAY].numpy()
        if set(value) == {DEQUE, "maxlen"}:
            return deque(unpack(value[DEQUE]), maxlen=value["maxlen"])
        return {key: unpack(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(unpack(each) for each in value)
    return value
