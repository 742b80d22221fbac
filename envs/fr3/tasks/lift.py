"""Lift: grasp a cube and raise it by ten centimetres.

Detour: go around the cans, left or right, and lift the cube behind them.

One can stands in the middle, another one on the left or on the right of it, at `can_distance`: at
8 to 10 cm it closes that way. A can that is knocked over ends the episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mujoco

from embodied.embodiments.arrays import namespace
from embodied.envs.fr3.tasks.task import (
    STIFF,
    Flags,
    Floats,
    Parameter,
    Params,
    Start,
    Task,
    Term,
    View,
    add_box,
    axis_of,
    centimetres,
    distance,
    near,
    sliding,
    spread,
    upright,
    yaw_of,
)

RAISED = 0.10
LARGEST = 0.03


def approach(view: View) -> Floats:
    """The tool point is at the cube."""
    return near(view.tool, view.place["cube"], 0.1)


def grasp(view: View) -> Floats:
    """The hand has closed on the cube."""
    close = distance(view.tool, view.place["cube"]) < 0.02
    holds = close & (view.width < 2.6 * view.param["cube_half"])
    return holds * namespace(view.width).ones_like(view.width)


def raised(view: View) -> Floats:
    """The share of the way up that the cube has gone, in [0, 1]."""
    height = view.place["cube"][:, 2] - view.param["cube_half"]
    return namespace(height).clip(height / RAISED, 0.0, 1.0)


class Lift(Task):
    """Success: the cube's bottom is ten centimetres above the table, with the cube in
    the gripper.
    """

    text = "pick up the cube and raise it ten centimetres above the table"
    parameters = (
        Parameter("cube_x", 0.38, 0.62),
        Parameter("cube_y", -0.20, 0.20),
        Parameter("cube_yaw", -0.4, 0.4, "rad"),
        Parameter("cube_half", 0.018, 0.024),
        Parameter("cube_friction", 0.8, 1.2, ""),
    )
    free = ("cube",)
    names = (
        *(f"cube_{axis}" for axis in "xyz"),
        *(f"cube_from_tool_{axis}" for axis in "xyz"),
        "cube_cos_4yaw",
        "cube_sin_4yaw",
        "cube_half",
    )
    terms: ClassVar[Mapping[str, Term]] = {"approach": approach, "grasp": grasp, "raised": raised}
    weights: ClassVar[Mapping[str, float]] = {"approach": 0.2, "grasp": 0.2, "raised": 0.6}

    def edit(self, spec: mujoco.MjSpec) -> None:
        add_box(spec, "cube", (LARGEST, LARGEST, LARGEST), (0.85, 0.23, 0.16, 1.0), 0.08)

    def shape(self, param: Params) -> dict[tuple[str, str], Floats]:
        half = param["cube_half"]
        friction = sliding(param["cube_friction"])
        size = namespace(half).tile(half[:, None], (1, 3))
        return {("geom_size", "cube"): size, ("geom_friction", "cube"): friction}

    def start(self, param: Params, draws: Floats) -> Start:
        xp = namespace(draws)
        place = xp.stack([param["cube_x"], param["cube_y"], param["cube_half"]], 1)
        tool = spread(draws, (0.40, -0.15, 0.15), (0.60, 0.15, 0.30))
        open_hand = xp.full_like(draws[:, 0], 0.08)
        return Start(tool, open_hand, free={"cube": (place, upright(param["cube_yaw"]))})

    def observe(self, view: View) -> Floats:
        cube, yaw = view.place["cube"], yaw_of(view.turn["cube"])
        xp = namespace(cube)
        # A cube looks the same after a quarter turn.
        facing = xp.stack([xp.cos(4 * yaw), xp.sin(4 * yaw), view.param["cube_half"]], 1)
        return xp.concatenate([cube, cube - view.tool, facing], 1)

    def success(self, view: View) -> Flags:
        high = view.place["cube"][:, 2] - view.param["cube_half"] > RAISED
        return high & (distance(view.tool, view.place["cube"]) < 0.05)

    def describe(self, view: View) -> str:
        return (
            f"The cube is at {centimetres(view.place['cube'])}; the tool is at "
            f"{centimetres(view.tool)}; the hand is open {view.width[0] * 100:.1f} cm."
        )


CANS = ("middle_can", "side_can")
ROW = 0.50  # x of both cans, m
RADIUS = 0.025
HALF_HEIGHT = 0.05
FALLEN = 0.7  # cosine of the tilt from which no can comes back
TIN = (0.16, 0.50, 0.42, 1.0)


class Detour(Lift):
    """Success: as in lift, with both cans standing."""

    text = "go around the cans without knocking one over, and pick up the cube behind them"
    parameters = (
        Parameter("cube_x", 0.60, 0.64),
        Parameter("cube_y", -0.05, 0.05),
        Parameter("cube_yaw", -0.4, 0.4, "rad"),
        Parameter("cube_half", 0.018, 0.024),
        Parameter("cube_friction", 0.8, 1.2, ""),
        Parameter("can_side", 0.0, 1.0, ""),
        Parameter("can_distance", 0.08, 0.10),
    )
    free = ("cube", *CANS)
    names = (*Lift.names, "side_can_y")

    def edit(self, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        for name in CANS:
            body = spec.worldbody.add_body(name=name)
            body.add_freejoint(name=name)
            body.add_geom(
                name=name,
                type=mujoco.mjtGeom.mjGEOM_CYLINDER,
                size=[RADIUS, HALF_HEIGHT, 0],
                rgba=TIN,
                mass=0.1,
                condim=4,
                priority=1,
                friction=[1.0, 0.01, 0.001],
                solref=STIFF,
            )

    def start(self, param: Params, draws: Floats) -> Start:
        begun = super().start(param, draws)
        zero = namespace(draws).zeros_like(draws[:, 0])
        begun.tool = spread(draws, (0.38, -0.02, 0.085), (0.42, 0.02, 0.10))
        begun.width = zero
        side = param["can_side"]
        distance = param["can_distance"]
        second = namespace(side).where(side < 0.5, -distance, distance)  # its y coordinate, m
        for name, y in zip(CANS, (zero, second), strict=True):
            place = namespace(zero).stack([zero + ROW, y, zero + HALF_HEIGHT], 1)
            begun.free[name] = (place, upright(zero))
        return begun

    def observe(self, view: View) -> Floats:
        seen = super().observe(view)
        return namespace(seen).concatenate([seen, view.place["side_can"][:, 1:2]], 1)

    def success(self, view: View) -> Flags:
        return super().success(view) & ~self.lost(view)

    def lost(self, view: View) -> Flags:
        middle, side = (axis_of(view.turn[name])[:, 2] < FALLEN for name in CANS)
        return middle | side
