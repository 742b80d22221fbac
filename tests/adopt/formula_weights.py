"""Weights of a network by a formula of their names, so that a test needs no file of weights.

It needs numpy only: LeRobot's interpreter runs it too.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

KEPT = ("num_batches_tracked", "pos_grid")  # counters and constants


def weight(name: str, shape: tuple[int, ...]) -> Any:
    """The array of the tensor `name`, float32: of the size of usual weights, never all equal."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    values = random.randn(*shape)
    if name.endswith("running_var"):
        values = 1 + 0.2 * np.abs(values)
    elif len(shape) == 1:
        centre = 1.0 if name.endswith("weight") else 0.0
        values = centre + 0.1 * values
    else:
        values = values / np.sqrt(np.prod(shape[1:]))
    return values.astype(np.float32)


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The arrays of all tensors, by name, except those that are not learned."""
    return {name: weight(name, shape) for name, shape in shapes.items() if not name.endswith(KEPT)}
