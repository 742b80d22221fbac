"""GradientLearner: base class of learners that are trained by gradient descent with Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from embodied.core.cuda_graph import Graph, Update
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam, Optimizer

P = ParamSpec("P")
T = TypeVar("T")


class GradientLearner(Learner):
    """Holds the optimisers by name in `optims`.

    The settings `compile` and `cuda_graph` speed up the same computation on a GPU: the constructor
    of a subclass passes its losses to `compiled` and its update to `recorded`.
    """

    config: Any
    optims: dict[str, Adam]

    def compiled(self, loss: Callable[P, T]) -> Callable[P, T]:
        """`loss`, compiled if the setting `compile` is true."""
        return torch.compile(loss) if self.config.compile else loss

    def recorded(self, step: Update) -> Update:
        """`step`, recorded as a CUDA graph if the setting `cuda_graph` is true."""
        if not self.config.cuda_graph:
            return step
        graph = Graph(step)
        self.graphs = [*getattr(self, "graphs", ()), graph]
        return graph

    def descend(self, name: str, loss: Tensor) -> None:
        """One gradient step of the optimiser `name` on `loss`."""
        loss.backward()
        self.optims[name].step()

    def optimizers(self) -> Mapping[str, Optimizer]:
        return dict(self.optims)

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for graph in getattr(self, "graphs", ()):
            graph.forget()  # the optimizers hold new tensors


@contextmanager
def frozen(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Freeze `parameters` (no gradients) inside the `with` block."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    yield
    for parameter in parameters:
        parameter.requires_grad_(True)


@torch.no_grad()
def soft_update(target: list[Tensor], online: list[Tensor], tau: float) -> None:
    """Polyak averaging in place: target <- target + tau (online - target)."""
    torch._foreach_lerp_(target, online, tau)  # pyright: ignore[reportPrivateImportUsage]
