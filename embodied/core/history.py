"""Past observations in a policy's carry: `history/NAME` [n, k, ...], oldest first, and `fresh` [n].

Both may be below a prefix, the carry of an inner policy: `base/history/state`, `base/fresh`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.tensors import Tensors

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


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (no.ndim - 1)), yes, no)
