"""Base class of tasks whose tool point has to get to a goal: reach, channel, course."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mujoco

from embodied.embodiments.arrays import namespace
from embodied.envs.fr3.tasks.task import (
    Flags,
    Floats,
    Params,
    Start,
    Task,
    Term,
    View,
    add_marker,
    centimetres,
    distance,
    near,
    spread,
)

GREEN = (0.20, 0.70, 0.35, 0.6)
Corner = tuple[float, float, float]


def approach(view: View) -> Floats:
    """The tool point is at the goal."""
    return near(view.tool, view.place["goal"], 0.1)


class GoalTask(Task):
    """Success: the tool point is within `close` (m) of the goal.

    An episode begins with the closed hand somewhere in the box from `tool_low` to `tool_high` (m),
    and with the goal of the parameters goal_x, goal_y and goal_z.
    """

    close: float
    tool_low: Corner
    tool_high: Corner
    markers = ("goal",)
    names = (*(f"goal_{axis}" for axis in "xyz"), *(f"goal_from_tool_{axis}" for axis in "xyz"))
    terms: ClassVar[Mapping[str, Term]] = {"approach": approach}
    weights: ClassVar[Mapping[str, float]] = {"approach": 1.0}

    def edit(self, spec: mujoco.MjSpec) -> None:
        add_marker(spec, "goal", self.close, GREEN)

    def start(self, param: Params, draws: Floats) -> Start:
        xp = namespace(draws)
        goal = xp.stack([param["goal_x"], param["goal_y"], param["goal_z"]], 1)
        tool = spread(draws, self.tool_low, self.tool_high)
        return Start(tool, xp.zeros_like(draws[:, 0]), marker={"goal": goal})

    def observe(self, view: View) -> Floats:
        goal = view.place["goal"]
        return namespace(goal).concatenate([goal, goal - view.tool], 1)

    def success(self, view: View) -> Flags:
        return distance(view.tool, view.place["goal"]) < self.close

    def describe(self, view: View) -> str:
        return f"{self.where(view)}."

    def where(self, view: View) -> str:
        """Tool and goal of the first env in `view`, in words."""
        tool = centimetres(view.tool)
        goal = centimetres(view.place["goal"])
        return f"The tool is at {tool}, the goal at {goal}"
