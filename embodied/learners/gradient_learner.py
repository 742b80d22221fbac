"""GradientLearner: base class of learners that are trained by gradient descent with Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam, Optimizer


class GradientLearner(Learner):
    """Holds the optimisers by name in `optims`.

    `_step` is the part of `update` that reads only its batch, its last argument, and tensors of the
    learner, so that it can be recorded as a CUDA graph; `losses` names the methods that can be
    compiled. `embodied.learners.acceleration.accelerate` does both.
    """

    losses: ClassVar[tuple[str, ...]] = ("_loss",)
    config: Any
    optims: dict[str, Adam]
    _step: Callable[..., Tensors]

    def descend(self, name: str, loss: Tensor) -> None:
        """One gradient step of the optimiser `name` on `loss`."""
        loss.backward()
        self.optims[name].step()

    def optimizers(self) -> Mapping[str, Optimizer]:
        return dict(self.optims)


@contextmanager
def frozen(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Freeze `parameters` (no gradients) inside the `with` block, also where it raises."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@torch.no_grad()
def soft_update(target: list[Tensor], online: list[Tensor], tau: float) -> None:
    """Polyak averaging in place: target <- target + tau (online - target)."""
    torch._foreach_lerp_(target, online, tau)  # pyright: ignore[reportPrivateImportUsage]
