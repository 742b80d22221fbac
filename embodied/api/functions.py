"""Functions of a Python program as rewards, teachers and learners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import ContractError
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors
from embodied.learners.imitation.behavior_cloning import BehaviorCloning
from embodied.teachers.teacher import Floats, Teacher


class FunctionReward(Reward):
    """`function(transitions)` as a reward that does not learn."""

    frozen = True

    def __init__(self, function: Callable[[Tensors], Any]) -> None:
        self.function = function

    def __call__(self, transitions: Tensors) -> Tensor:
        usual = transitions["reward"]
        made = torch.as_tensor(self.function(transitions), dtype=usual.dtype, device=usual.device)
        _require_shape("reward", made, usual.shape)
        return made


class FunctionTeacher(Teacher):
    """`function(n, random)` as a teacher that does not learn: points [n, d] of the unit cube."""

    function: ClassVar[Callable[[int, np.random.Generator], Any]]

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        points = np.asarray(self.function(n, self.random), np.float64)
        _require_shape("teacher", points, (n, len(self.space)))
        return [(point, None) for point in points]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        """Scores change nothing."""


class FunctionLoss(BehaviorCloning):
    """`function(policy, batch)` as the loss of an offline training: a number."""

    function: ClassVar[Callable[[Any, Tensors], Tensor]]

    def loss(self, batch: Tensors) -> Tensor:
        made = self.function(self.online, batch)
        _require_shape("learner", made, ())
        return made


def as_part(group: str, function: Callable[..., Any]) -> Any:
    """The reward, the class of a teacher or the class of a learner that `function` becomes."""
    if group == "reward":
        return FunctionReward(function)
    base = {"teacher": FunctionTeacher, "learner": FunctionLoss}[group]
    return type(base.__name__, (base,), {"function": staticmethod(function)})


def _require_shape(group: str, made: Any, shape: tuple[int, ...]) -> None:
    if tuple(np.shape(made)) != tuple(shape):
        raise ContractError(
            f"the {group} function returned numbers {list(np.shape(made))}: return {list(shape)}"
        )
