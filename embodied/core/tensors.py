"""Tensors: a flat dict of torch tensors with shared leading dimensions (a batch).

Keys are paths (`obs/state`, `next_obs/wrist`), never nested; images stay uint8 HWC until a network
encodes them. A policy's carry may hold past observations: `history/NAME` [n, k, ...], oldest first,
and `fresh` [n]. Both may be below a prefix, the carry of an inner policy: `base/history/state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def length(rows: Tensors) -> int:
    """The shared first dimension of `rows`; ValueError if they differ or `rows` is empty."""
    sizes = {value.shape[0] for value in rows.values()}
    if len(sizes) != 1:
        shapes = {key: tuple(value.shape) for key, value in rows.items()}
        raise ValueError(f"tensors of a batch need one shared length, got {shapes}")
    return sizes.pop()


def each(rows: Tensors, function: Callable[[Tensor], Tensor]) -> Tensors:
    return {key: function(value) for key, value in rows.items()}


def take(rows: Tensors, index: Tensor) -> Tensors:
    """The elements `index` [n] (int64) of the first dimension of every leaf, copied."""
    return {key: value.index_select(0, index) for key, value in rows.items()}


def put(rows: Tensors, index: Tensor, values: Tensors) -> None:
    """Write `values` [n, ...] to the elements `index` [n] of `rows`, in place."""
    for key, value in values.items():
        rows[key].index_copy_(0, index, value.to(rows[key].dtype))


def where(mask: Tensor, yes: Tensors, no: Tensors) -> Tensors:
    """Select along the first dimension: `yes` where `mask` [n] is true, else `no`."""
    return {key: _where(mask, yes[key], value) for key, value in no.items()}


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (no.ndim - 1)), yes, no)


def cat(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate along the first dimension; every part has the same keys."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def stack(parts: Sequence[Tensors], dim: int = 0) -> Tensors:
    """Stack along a new dimension; every part has the same keys."""
    return {key: torch.stack([part[key] for part in parts], dim) for key in parts[0]}


def under(rows: Tensors, prefix: str) -> Tensors:
    """The leaves below `prefix/`, with the prefix removed: `under(rows, "obs")`."""
    start = prefix + "/"
    return {key[len(start) :]: value for key, value in rows.items() if key.startswith(start)}


def nest(rows: Tensors, prefix: str) -> Tensors:
    """The inverse of `under`: put every key below `prefix/`."""
    return {f"{prefix}/{key}": value for key, value in rows.items()}


def to(rows: Tensors, device: torch.device | str) -> Tensors:
    """Move every leaf to `device` (asynchronously where the memory is pinned)."""
    return {key: value.to(device, non_blocking=True) for key, value in rows.items()}


def state_to(state: Any, device: torch.device | str) -> Any:
    """A state of nested dicts and lists with all its tensors on `device`."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: state_to(value, device) for key, value in cast(dict[str, Any], state).items()}
    if isinstance(state, list):
        return [state_to(value, device) for value in cast(list[Any], state)]
    return state


HISTORY = "history/"
FRESH = "fresh"


def is_history(key: str) -> bool:
    """Whether a key of a carry belongs to the past observations."""
    return HISTORY in key or key.rpartition("/")[2] == FRESH


def history_steps(carry: Tensors) -> dict[str, int]:
    """The names of the past observations in a carry, and how many steps back they go."""
    found = {key.rpartition(HISTORY)[2]: past for key, past in carry.items() if HISTORY in key}
    return {name: past.shape[1] for name, past in found.items()}


def remembered(carry: Tensors, obs: Tensors) -> Tensors:
    """The carry after a control step at `obs`: each history gets the observation as its newest;
    rows that are `fresh` get copies of it."""
    kept = dict(carry)
    for key, past in carry.items():
        prefix, found, name = key.rpartition(HISTORY)
        if not found:
            continue
        fresh = carry[prefix + FRESH]
        now = obs[name][:, None].to(past.dtype)
        shifted = torch.cat([past[:, 1:], now], 1)
        kept[key] = _where(fresh, now.expand_as(past), shifted)
        kept[prefix + FRESH] = torch.zeros_like(fresh)
    return kept


def with_history(obs: Tensors, carry: Tensors) -> Tensors:
    """`obs` with the past observations of `carry`, except those that it has already; of rows that
    are `fresh`, copies of the present ones."""
    found = dict(obs)
    for key, past in carry.items():
        if key.startswith(HISTORY) and key not in obs:
            now = obs[key.removeprefix(HISTORY)][:, None]
            found[key] = _where(carry[FRESH], now.expand_as(past).to(past.dtype), past)
    return found
