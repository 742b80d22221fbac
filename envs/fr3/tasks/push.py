"""Push: slide a cube over the table to a goal with the closed gripper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mujoco

from embodied.embodiments.arrays import namespace
from embodied.envs.fr3.tasks.task import (
    Flags,
    Floats,
    Parameter,
    Params,
    Start,
    Task,
    Term,
    View,
    add_box,
    add_disc,
    centimetres,
    distance,
    near,
    sliding,
    spread,
    upright,
    yaw_of,
)

CLOSE = 0.025
HALF = 0.025


def approach(view: View) -> Floats:
    """The tool point is behind the cube, on the side away from the goal."""
    way = view.place["goal"] - view.place["cube"]
    xp = namespace(way)
    way = way / xp.clip(xp.linalg.norm(way, axis=1, keepdims=True), 1e-9, None)
    return near(view.tool, view.place["cube"] - 0.04 * way, 0.1)


def arrive(view: View) -> Floats:
    """The cube is at the goal."""
    return near(view.place["cube"], view.place["goal"], 0.1)


class Push(Task):
    """Success: the cube's centre is within two and a half centimetres of the goal's, on
    the table.
    """

    text = "push the cube onto the green disc"
    parameters = (
        Parameter("cube_x", 0.42, 0.56),
        Parameter("cube_y", -0.12, 0.12),
        Parameter("cube_yaw", -0.6, 0.6, "rad"),
        Parameter("goal_distance", 0.10, 0.16),
        Parameter("goal_angle", -3.1416, 3.1416, "rad"),
        Parameter("cube_friction", 0.3, 0.6, ""),
    )
    free = ("cube",)
    markers = ("goal",)
    names = (
        *(f"cube_{axis}" for axis in "xyz"),
        *(f"cube_from_tool_{axis}" for axis in "xyz"),
        *(f"goal_{axis}" for axis in "xyz"),
        *(f"goal_from_cube_{axis}" for axis in "xyz"),
        "cube_cos_4yaw",
        "cube_sin_4yaw",
    )
    terms: ClassVar[Mapping[str, Term]] = {"approach": approach, "arrive": arrive}
    weights: ClassVar[Mapping[str, float]] = {"approach": 0.3, "arrive": 0.7}
    horizon = 100

    def edit(self, spec: mujoco.MjSpec) -> None:
        add_box(spec, "cube", (HALF, HALF, HALF), (0.18, 0.42, 0.78, 1.0), 0.1)
        add_disc(spec, "goal", 0.04, (0.20, 0.70, 0.35, 0.8))

    def shape(self, param: Params) -> dict[tuple[str, str], Floats]:
        return {("geom_friction", "cube"): sliding(param["cube_friction"])}

    def start(self, param: Params, draws: Floats) -> Start:
        xp = namespace(draws)
        height = xp.full_like(draws[:, 0], HALF)
        cube = xp.stack([param["cube_x"], param["cube_y"], height], 1)
        angle = param["goal_angle"]
        away = param["goal_distance"]
        zero = xp.zeros_like(angle)
        goal = cube + away[:, None] * xp.stack([xp.cos(angle), xp.sin(angle), zero], 1)
        tool = spread(draws, (0.40, -0.15, 0.12), (0.60, 0.15, 0.25))
        turn = upright(param["cube_yaw"])
        return Start(tool, zero, free={"cube": (cube, turn)}, marker={"goal": goal})

    def observe(self, view: View) -> Floats:
        cube = view.place["cube"]
        goal = view.place["goal"]
        yaw = 4 * yaw_of(view.turn["cube"])
        xp = namespace(cube)
        facing = xp.stack([xp.cos(yaw), xp.sin(yaw)], 1)
        return xp.concatenate([cube, cube - view.tool, goal, goal - cube, facing], 1)

    def success(self, view: View) -> Flags:
        return distance(view.place["cube"], view.place["goal"]) < CLOSE

    def describe(self, view: View) -> str:
        cube = view.place["cube"]
        goal = view.place["goal"]
        return (
            f"The cube is at {centimetres(cube)}, the disc's centre above the table at "
            f"{centimetres(goal)}; the tool is at {centimetres(view.tool)}."
        )
