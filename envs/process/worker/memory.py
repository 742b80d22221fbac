"""Named arrays in one file that both processes have mapped into their memory."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

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


CRITIC_ONLY = ("privileged", "critic")
"""Simulators mark observations for critics so, for example `privileged_state` (Playground)."""
WORDS = re.compile("[A-Z]?[a-z0-9]+|[A-Z]+")
GROUPS = {"actor": "state", "policy": "state"}


def flat_name(path: tuple[str, ...], alone: str) -> str:
    """The name of a leaf of nested observations; `alone` where there is no path.

    A word anywhere in it that marks the leaf for critics becomes the prefix that hides it from
    policies: `privileged_state` is `privileged/state`, `critic` is `critic/state`.
    """
    for at, part in enumerate(path):
        words = WORDS.findall(part)
        for mark in CRITIC_ONLY:
            if mark in (word.lower() for word in words):
                rest = "_".join(word for word in words if word.lower() != mark)
                named = (*path[:at], rest, *path[at + 1 :])
                return "/".join((mark, *filter(None, named))) if any(named) else f"{mark}/state"
    return "/".join(path) or alone


def grouped(obs: Mapping[str, Any]) -> dict[str, Any]:
    """Observation groups of mjlab, of one value or of several by name: `actor` is `state`."""
    flat: dict[str, Any] = {}
    for group, value in obs.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for term, part in parts.items():
            path = (GROUPS.get(group, group), term)
            flat[flat_name(tuple(filter(None, path)), "state")] = part
    return flat


def misfit(value: Any, space: Any) -> str:
    """What is wrong with numbers that are not in a `space` of integers, to whose type they would be
    cut; empty where nothing is."""
    given, kind = np.asarray(value), np.dtype(space.dtype)
    if kind.kind not in "iu" or given.dtype.kind not in "biuf" or given.shape != space.shape:
        return ""
    with np.errstate(invalid="ignore"):
        whole = given.astype(kind)
    if np.array_equal(whole, given) and (hasattr(space, "low") or whole in space):
        return ""
    ends = f"{given.min():g} to {given.max():g}"
    return f"has numbers from {ends}, which are not in observation_space: {space}"


def is_true(value: Any) -> bool:
    """Whether an environment says yes by a flag, a share above one half, or an array of one of
    them. ValueError for anything else."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf" or array.ravel()[0] != array.ravel()[0]:
        raise ValueError(f"{value!r} is neither true nor false")
    return bool(array.ravel()[0] > 0.5)
