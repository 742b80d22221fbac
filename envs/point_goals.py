"""PointGoals: the goals of environments in which a point has to get to another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors

BETWEEN = "goal_from_"


class PointGoals:
    """A GoalSpace over the elements of the observation `state` (m): `goal_x`, the point that has to
    get there, as `tool_x`, and what is between them, as `goal_from_tool_x`, each in x, y and z.

    Within `close` (m) the reward is 1 and the episode ends, else it is 0. ConfigError if `state`
    has no such elements, or if the reward of the environment `name` is `shaped`, another one.
    """

    leaves = ("state",)

    def __init__(self, state: Leaf, close: float, shaped: bool, name: str) -> None:
        points = [n[len(BETWEEN) : -2] for n in state.names if n.startswith(BETWEEN)]
        if not points or not close:
            raise ConfigError(f"{name} has no goals that could be replaced")
        if shaped:
            raise ConfigError(f"{name}: the reward for another goal is known for env.reward=sparse")
        self.close = close
        self.goal = _columns(state.names, "goal")
        self.point = _columns(state.names, points[0])
        self.between = _columns(state.names, BETWEEN + points[0])

    def reached(self, obs: Tensors) -> Tensors:
        return {"goal": obs["state"][:, self.point]}

    def replaced(self, obs: Tensors, goals: Tensors) -> Tensors:
        state = obs["state"].clone()
        state[:, self.goal] = goals["goal"]
        state[:, self.between] = goals["goal"] - state[:, self.point]
        return {"state": state}

    def outcome(self, next_obs: Tensors) -> tuple[Tensor, Tensor]:
        there = next_obs["state"][:, self.between].norm(dim=1) < self.close
        return there.float(), there


def _columns(names: Sequence[str], what: str) -> Tensor:
    return torch.tensor([names.index(f"{what}_{axis}") for axis in "xyz"])
