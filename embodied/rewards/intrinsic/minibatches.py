"""Minibatches of a batch, for rewards that learn.

The batch of an on-policy learner holds thousands of transitions; a single gradient step on all of
them would learn too slowly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.core.tensors import Tensors, length, take


def minibatches(
    learn: Callable[[Tensors], dict[str, Tensor]],
    transitions: Tensors,
    size: int,
    generator: torch.Generator,
    share: float = 1.0,
) -> dict[str, Tensor]:
    """Call `learn` on random minibatches of `size` transitions and average its metrics.

    Uses a random fraction `share` of the transitions (at least one), each once.
    """
    count = length(transitions)
    order = torch.randperm(count, generator=generator, device=generator.device)
    order = order[: max(round(share * count), 1)]
    seen = [learn(take(transitions, part)) for part in order.split(size)]
    return {key: torch.stack([each[key] for each in seen]).mean() for key in seen[0]}
