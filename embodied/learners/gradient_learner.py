"""Descent: what learners with optimisers have in common beside their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from embodied.core.cuda_graph import Graph, Update
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam

P = ParamSpec("P")
T = TypeVar("T")


class Descent(Learner):
    """Its optimisers are in `adams`, by name. The settings `compile` and `cuda_graph` make the same
    code faster code, where a constructor says `compiled` and `recorded`; they are for GPUs."""

    config: Any
    adams: dict[str, Adam]

    def compiled(self, loss: Callable[P, T]) -> Callable[P, T]:
        """`loss`, by the compiler where the settings say so."""
        return torch.compile(loss) if self.config.compile else loss

    def recorded(self, step: Update) -> Update:
        """`step`, as a CUDA graph where the settings say so."""
        if not self.config.cuda_graph:
            return step
        graph = Graph(step)
        self.graphs = [*getattr(self, "graphs", ()), graph]
        return graph

    def descend(self, name: str, loss: Tensor) -> None:
        """One step of one optimiser."""
        loss.backward()
        self.adams[name].step()

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return dict(self.adams)

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for graph in getattr(self, "graphs", ()):
            graph.forget()  # the optimizers hold new tensors


@contextmanager
def still(weights: Sequence[Tensor]) -> Iterator[None]:
    """No gradients for weights that do not move meanwhile."""
    for weight in weights:
        weight.requires_grad_(False)
    yield
    for weight in weights:
        weight.requires_grad_(True)


@torch.no_grad()
def follow(averages: list[Tensor], weights: list[Tensor], tau: float) -> None:
    """averages <- averages + tau (weights - averages), in place."""
    torch._foreach_lerp_(averages, weights, tau)  # pyright: ignore[reportPrivateImportUsage]
