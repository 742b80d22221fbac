"""Detour: go around the cans, left or right, and lift the cube behind them.

One can stands in the middle, another one on the left or on the right of it, at `can_distance`: at
8 to 10 cm it closes that way. A can that is knocked over ends the episode.
"""

from __future__ import annotations

import mujoco

from embodied.embodiments.arrays import namespace
from embodied.envs.fr3.tasks.lift import Lift
from embodied.envs.fr3.tasks.task import (
    STIFF,
    Flags,
    Floats,
    Parameter,
    Params,
    Start,
    View,
    axis_of,
    spread,
    upright,
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
