"""Reach: move the tool point to a goal position in the air."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mujoco

from embodied.embodiments.arrays import namespace
from envs.fr3.tasks.task import (
    Flags,
    Floats,
    Parameter,
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

CLOSE = 0.02


def approach(view: View) -> Floats:
    """The tool point is at the goal."""
    return near(view.tool, view.place["goal"], 0.1)


class Reach(Task):
    """Success: the tool point is within two centimetres of the goal."""

    text = "move the tool to the green ball"
    parameters = (
        Parameter("goal_x", 0.35, 0.65),
        Parameter("goal_y", -0.25, 0.25),
        Parameter("goal_z", 0.08, 0.40),
    )
    markers = ("goal",)
    names = (*(f"goal_{axis}" for axis in "xyz"), *(f"goal_from_tool_{axis}" for axis in "xyz"))
    terms: ClassVar[Mapping[str, Term]] = {"approach": approach}
    weights: ClassVar[Mapping[str, float]] = {"approach": 1.0}
    horizon = 50

    def edit(self, spec: mujoco.MjSpec) -> None:
        add_marker(spec, "goal", CLOSE, (0.20, 0.70, 0.35, 0.6))

    def start(self, param: Params, draws: Floats) -> Start:
        xp = namespace(draws)
        goal = xp.stack([param["goal_x"], param["goal_y"], param["goal_z"]], 1)
        tool = spread(draws, (0.38, -0.20, 0.12), (0.60, 0.20, 0.35))
        return Start(tool, xp.zeros_like(draws[:, 0]), marker={"goal": goal})

    def observe(self, view: View) -> Floats:
        goal = view.place["goal"]
        return namespace(goal).concatenate([goal, goal - view.tool], 1)

    def success(self, view: View) -> Flags:
        return distance(view.tool, view.place["goal"]) < CLOSE

    def describe(self, view: View) -> str:
        tool, goal = centimetres(view.tool), centimetres(view.place["goal"])
        return f"The tool is at {tool}, the goal at {goal}."
