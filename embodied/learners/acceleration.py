"""Acceleration: what makes an update faster and changes its results by rounding only.

Losses are compiled, the update is recorded as CUDA graphs, or native code takes the place of the
PyTorch code. Whoever builds a learner puts it around that learner, after moving it to its device:

    learner = accelerate(build(node, Learner, ...).to(device), native=True)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from embodied.core.cuda_graph import Graph
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner

NATIVE = (
    "embodied.learners.off_policy.sac.Sac",
    "embodied.learners.off_policy.td3.Td3",
    "embodied.learners.on_policy.ppo.Ppo",
)
"""The classes that `embodied.learners.native` equals; names, as most runs need none of them."""
AnyLearner = TypeVar("AnyLearner", bound=Learner)


@dataclass(frozen=True)
class Acceleration:
    """How an update runs (`accelerate`); the results are the same up to rounding."""

    compile: bool = False  # compile the losses with torch.compile (for GPUs; slower on a CPU)
    cuda_graph: bool = False  # record the update as a CUDA graph and replay it (GPUs only)


class RecordedStep:
    """A learner's `_step` or `update` as CUDA graphs: one for each set of leading arguments."""

    def __init__(self, step: Callable[..., Tensors]) -> None:
        self.step = step
        self.graphs: dict[tuple[Any, ...], Graph] = {}

    def __call__(self, *arguments: Any) -> Tensors:
        *kind, batch = arguments
        key = tuple(kind)
        if key not in self.graphs:
            self.graphs[key] = Graph(partial(self.step, *kind))
        return self.graphs[key](batch)

    def forget(self, *_: Any) -> None:
        """Discard the recordings: a loaded state has other optimiser tensors."""
        self.graphs.clear()


def accelerate(learner: AnyLearner, native: bool = False) -> AnyLearner:
    """Put around `learner`, and around learners inside it, what their settings ask for; `native`:
    use native code too, if `native_obstacle` is None."""
    for part in learner.modules():
        settings = getattr(part, "config", None)
        if isinstance(part, Learner) and isinstance(settings, Acceleration):
            if settings.compile:
                for name in part.losses:
                    setattr(part, name, torch.compile(getattr(part, name)))
            if settings.cuda_graph:
                name = "_step" if hasattr(type(part), "_step") else "update"
                step = RecordedStep(getattr(part, name))
                setattr(part, name, step)
                part.register_load_state_dict_post_hook(step.forget)
    if native and native_obstacle(learner) is None:
        importlib.import_module("embodied.learners.native").use(learner)
    return learner


def native_obstacle(learner: Learner) -> str | None:
    """Why the update has no native code that equals it; None if it has, "" if no such code is
    written for this learner."""
    own, *bases = (
        f"{kind.__module__}.{kind.__qualname__}" in NATIVE for kind in type(learner).__mro__
    )
    if own:
        return importlib.import_module("embodied.learners.native").obstacle(learner)
    return f"{type(learner).__name__} has other losses" if any(bases) else ""
