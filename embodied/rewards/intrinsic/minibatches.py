"""Parts: the rows of a batch, in any order and a few at a time, for rewards that learn.

An on-policy learner's batch holds thousands of rows: one step of Adam for all would teach little.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.core.tensors import Tensors, length, take


def minibatches(
    learn: Callable[[Tensors], dict[str, Tensor]],
    rows: Tensors,
    size: int,
    generator: torch.Generator,
    share: float = 1.0,
) -> dict[str, Tensor]:
    """Means of what `learn` returns for parts of at most `size` rows of a random `share` of them
    (at least one), each row once."""
    count = length(rows)
    order = torch.randperm(count, generator=generator, device=generator.device)
    order = order[: max(round(share * count), 1)]
    seen = [learn(take(rows, part)) for part in order.split(size)]
    return {key: torch.stack([each[key] for each in seen]).mean() for key in seen[0]}
