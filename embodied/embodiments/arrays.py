"""Array functions that work on numpy arrays and torch tensors alike.

Both libraries use nearly the same names (`stack`, `tanh`, `linalg.norm(x, axis=1)`, `x.mT`), so
code calls the `namespace` of its argument; this module covers the functions that differ. A robot
driver needs numpy only: torch is used only if the input is a tensor.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Floats = Any
"""float64 numbers [B, ...]: a numpy array, or a torch tensor on any device."""


def namespace(like: Floats) -> Any:
    """The library of `like`: the numpy module or the torch module."""
    return np if isinstance(like, np.ndarray) else sys.modules["torch"]


def constant(value: ArrayLike, like: Floats) -> Floats:
    """`value` as float64 of the kind and on the device of `like`; tensors are kept for next time,
    so that asking again costs no transfer."""
    array = np.asarray(value, np.float64)
    if isinstance(like, np.ndarray):
        return array
    return _kept(array.tobytes(), array.shape, like.device)


def solve(matrix: Floats, right: Floats) -> Floats:
    """Solve `matrix` [B, n, n] x = `right` [B, n, k] for x; the matrices have to be invertible."""
    if isinstance(matrix, np.ndarray):
        return np.linalg.solve(matrix, right)
    # A check for singular matrices would synchronise with the device.
    return namespace(matrix).linalg.solve_ex(matrix, right, check_errors=False)[0]


def shortened(vector: Floats, longest: float) -> Floats:
    """Vectors [B, 3], scaled down to at most `longest`."""
    xp = namespace(vector)
    length = xp.linalg.norm(vector, axis=1, keepdims=True)
    return vector * xp.clip(longest / xp.clip(length, 1e-12, None), None, 1.0)


@lru_cache(maxsize=512)
def _kept(data: bytes, shape: tuple[int, ...], device: Any) -> Any:
    array = np.frombuffer(data, np.float64).reshape(shape).copy()
    return sys.modules["torch"].from_numpy(array).to(device)
