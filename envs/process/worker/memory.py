"""Named arrays in one file that both processes have mapped into their memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

# name, numpy dtype, shape
Layout = Sequence[tuple[str, str, Sequence[int]]]
ALIGN = 64


def total(layout: Layout) -> int:
    """The number of bytes that the arrays of `layout` need."""
    return sum(_padded(dtype, shape) for _, dtype, shape in layout)


def mapped(path: str, layout: Layout) -> dict[str, np.ndarray]:
    """The arrays of `layout` in the file `path`, which must be large enough (ValueError)."""
    with open(path, "r+b") as file:
        if os.fstat(file.fileno()).st_size < total(layout):
            raise ValueError(f"{path} is smaller than its layout")
        memory = mmap.mmap(file.fileno(), 0)
    arrays = {}
    at = 0
    for name, dtype, shape in layout:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(memory, dtype, count, at).reshape(tuple(shape))
        at += _padded(dtype, shape)
    return arrays


def _padded(dtype: str, shape: Sequence[int]) -> int:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return -(-max(size, 1) // ALIGN) * ALIGN
