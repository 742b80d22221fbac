"""Fitting a small model: a gradient step, loops over batches and minibatches, held-out indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from embodied.core.tensors import Tensors, length, take
from embodied.nn.optim import Adam, Optimizer


def gradient_step(optimizer: Optimizer, loss: Tensor) -> None:
    """Minimise `loss` by one step of the optimiser."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def fit(
    parameters: Iterable[nn.Parameter],
    loss_of_batch: Callable[[], Tensor],
    updates: int,
    lr: float,
    decreasing: bool = False,
) -> float:
    """Take `updates` steps of AdamW on the losses of new batches; `decreasing`: the learning rate
    falls from `lr` to 0 as a cosine. Returns the mean loss of the last tenth of the updates."""
    adam = Adam(parameters, lr, weight_decay=1e-3, decoupled=True, local=True)
    late: list[float] = []
    for update in range(updates):
        if decreasing:
            adam.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * update / updates)) / 2
        loss = loss_of_batch()
        gradient_step(adam, loss)
        if update >= int(0.9 * updates):
            late.append(loss.item())
    return sum(late) / len(late)


def held_out(count: int, share: float, random: torch.Generator) -> Tensor:
    """Random indices of about `share` of `count` items, at least one; none of no items."""
    return torch.randperm(count, generator=random)[: max(1, round(share * count))]


def minibatches(
    learn: Callable[[Tensors], dict[str, Tensor]],
    transitions: Tensors,
    size: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Call `learn` on random minibatches of `size` transitions and average its metrics.

    Uses each transition once. The batch of an on-policy learner is too large for a single gradient
    step.
    """
    count = length(transitions)
    order = torch.randperm(count, generator=generator, device=generator.device)
    seen = [learn(take(transitions, part)) for part in order.split(size)]
    return {key: torch.stack([each[key] for each in seen]).mean() for key in seen[0]}
