"""Tasks with objects that are moved: lift, detour, slalom, push, insert.

Detour: one can stands in the middle, another one on the left or on the right of it, at
`can_distance`: at 8 to 10 cm it closes that way. A can that is knocked over ends the episode.

Slalom: two walls stand between the hand and the cube, each with a gap at a place of its own. A wall
that is touched, or a hand above the walls, ends the episode.

Insert: the hole is less than half a millimetre wider than the peg that is held. The observed hole
position has a constant error per episode, as from a calibrated camera. The position of the peg tip
relative to the true hole is observed exactly, as from a wrist camera. An open-loop plan from the
first observation misses; closed-loop correction succeeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import mujoco

from embodied.embodiments.arrays import constant, namespace
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
    add_disc,
    add_free,
    add_solid,
    axis_of,
    centimetres,
    distance,
    near,
    sliding,
    spread,
    upright,
    yaw_of,
)

LARGEST = 0.03


def approach(view: View) -> Floats:
    """The tool point is at the cube."""
    return near(view.tool, view.place["cube"], 0.1)


def grasp(within: float) -> Term:
    """The hand has closed on the cube, which is `within` (m) of the tool point."""

    def term(view: View) -> Floats:
        close = distance(view.tool, view.place["cube"]) < within
        holds = close & (view.width < 2.6 * view.param["cube_half"])
        return holds * namespace(view.width).ones_like(view.width)

    return term


def raised(top: float) -> Term:
    """The share of the way up to `top` (m) that the cube has gone, in [0, 1]."""

    def term(view: View) -> Floats:
        height = view.place["cube"][:, 2] - view.param["cube_half"]
        return namespace(height).clip(height / top, 0.0, 1.0)

    return term


class Lift(Task):
    """Success: the cube's bottom is `top` (m) above the table, with the cube in the gripper."""

    top = 0.10

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
    terms: ClassVar[Mapping[str, Term]] = {
        "approach": approach,
        "grasp": grasp(0.02),
        "raised": raised(top),
    }
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
        high = view.place["cube"][:, 2] - view.param["cube_half"] > self.top
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
CYLINDER = mujoco.mjtGeom.mjGEOM_CYLINDER


class Detour(Lift):
    """Success: as in lift, with both cans standing."""

    text = "go around the cans without knocking one over, and pick up the cube behind them"
    parameters = (
        Parameter("cube_x", 0.60, 0.64),
        Parameter("cube_y", -0.05, 0.05),
        *Lift.parameters[2:],
        Parameter("can_side", 0.0, 1.0, ""),
        Parameter("can_distance", 0.08, 0.10),
    )
    free = ("cube", *CANS)
    names = (*Lift.names, "side_can_y")

    def edit(self, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        for name in CANS:
            can = add_free(spec, name)
            add_solid(
                can, CYLINDER, (RADIUS, HALF_HEIGHT, 0.0), (0.0, 0.0, 0.0), TIN, 0.1, name=name
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


WALLS_X = (0.45, 0.54)  # x of the two walls, m
WALL_HALF = (0.006, 0.15, 0.025)
FINGERS_HALF = 0.0095  # of the closed fingers, in x and y, m
SIDES = ("left", "right")


class Slalom(Lift):
    """Success: as in lift, through the gaps of both walls."""

    text = "go through the gaps of both walls without touching them, and pick up the cube behind"
    parameters = (
        Parameter("cube_x", 0.64, 0.66),
        Parameter("cube_y", -0.05, 0.05),
        *Lift.parameters[2:],
        Parameter("first_gap_y", -0.07, 0.07),
        Parameter("second_gap_y", -0.07, 0.07),
        Parameter("gap_width", 0.10, 0.10),
    )
    markers = tuple(f"{wall}_wall_{side}" for wall in ("first", "second") for side in SIDES)
    names = (*Lift.names, "first_gap_y", "second_gap_y")

    def edit(self, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        for name in self.markers:
            spec.worldbody.add_body(name=name, mocap=True).add_geom(
                name=name, type=mujoco.mjtGeom.mjGEOM_BOX, size=WALL_HALF, rgba=TIN
            )

    def start(self, param: Params, draws: Floats) -> Start:
        begun = super().start(param, draws)
        xp = namespace(draws)
        begun.tool = spread(draws, (0.36, -0.02, 0.025), (0.38, 0.02, 0.035))
        begun.width = xp.zeros_like(draws[:, 0])
        away = param["gap_width"] / 2 + WALL_HALF[1]
        for k, (x, gap) in enumerate(zip(WALLS_X, _gaps(param), strict=True)):
            for name, y in zip(self.markers[2 * k :], (gap + away, gap - away), strict=False):
                there = [xp.full_like(y, x), y, xp.full_like(y, WALL_HALF[2])]
                begun.marker[name] = xp.stack(there, 1)
        return begun

    def observe(self, view: View) -> Floats:
        xp = namespace(view.tool)
        return xp.concatenate([super().observe(view), xp.stack(_gaps(view.param), 1)], 1)

    def success(self, view: View) -> Flags:
        return super().success(view) & ~self.lost(view)

    def lost(self, view: View) -> Flags:
        x, y, z = view.tool.T
        free = view.param["gap_width"] / 2 - FINGERS_HALF
        lost = (x < WALLS_X[-1]) & (z > 2 * WALL_HALF[2])
        for wall, gap in zip(WALLS_X, _gaps(view.param), strict=True):
            lost = lost | ((abs(x - wall) < WALL_HALF[0] + FINGERS_HALF) & (abs(y - gap) > free))
        return lost


def _gaps(param: Params) -> list[Floats]:
    """The y [n] (m) of the middle of the gap in each wall."""
    return [param["first_gap_y"], param["second_gap_y"]]


PUSHED_HALF = 0.025


def behind(view: View) -> Floats:
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
    close = 0.025
    terms: ClassVar[Mapping[str, Term]] = {"approach": behind, "arrive": arrive}
    weights: ClassVar[Mapping[str, float]] = {"approach": 0.3, "arrive": 0.7}
    horizon = 100

    def edit(self, spec: mujoco.MjSpec) -> None:
        add_box(spec, "cube", (PUSHED_HALF, PUSHED_HALF, PUSHED_HALF), (0.18, 0.42, 0.78, 1.0), 0.1)
        add_disc(spec, "goal", 0.04, (0.20, 0.70, 0.35, 0.8))

    def shape(self, param: Params) -> dict[tuple[str, str], Floats]:
        return {("geom_friction", "cube"): sliding(param["cube_friction"])}

    def start(self, param: Params, draws: Floats) -> Start:
        xp = namespace(draws)
        height = xp.full_like(draws[:, 0], PUSHED_HALF)
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
        return distance(view.place["cube"], view.place["goal"]) < self.close

    def describe(self, view: View) -> str:
        cube = view.place["cube"]
        goal = view.place["goal"]
        return (
            f"The cube is at {centimetres(cube)}, the disc's centre above the table at "
            f"{centimetres(goal)}; the tool is at {centimetres(view.tool)}."
        )


HOLE = 0.010  # half the width of the square hole, m
BLOCK = 0.035  # half the width of the block, m
TOP = 0.030  # height of the block, m
HANDLE = 0.012  # half width of the part that is held, m
TIP = -0.055  # the tip below the body's origin (the middle of the handle), m
CHAMFER = 0.0002
DEPTH = 0.02
LIGHT = (0.93, 0.69, 0.13, 1.0)
DARK = (0.30, 0.34, 0.40, 1.0)


def tip_from_hole(view: View) -> Floats:
    """The peg's tip [n, 3] against the middle of the hole's rim."""
    tip = view.place["peg"] + TIP * axis_of(view.turn["peg"])
    return tip - _rim(view)


def above(view: View) -> Floats:
    """The tip is on the hole's axis."""
    away = _from_axis(tip_from_hole(view))
    return 1 - namespace(away).tanh(away / 0.01)


def inserted(view: View) -> Floats:
    """The share of the way in that the tip has gone, in [0, 1], counted on the axis only."""
    tip = tip_from_hole(view)
    xp = namespace(tip)
    return xp.where(_from_axis(tip) < 0.002, xp.clip(-tip[:, 2] / DEPTH, 0.0, 1.0), 0.0)


def _rim(view: View) -> Floats:
    """The middle of the hole's rim [n, 3]."""
    return view.place["hole"] + constant((0.0, 0.0, TOP), view.place["hole"])


def _from_axis(tip: Floats) -> Floats:
    """The distance [n] (m) of tips [n, 3] against the rim from the hole's axis."""
    return namespace(tip).linalg.norm(tip[:, :2], axis=1)


class Insert(Task):
    """Success: the tip is two centimetres deep in the hole."""

    text = "insert the peg in the hole of the block"
    parameters = (
        Parameter("hole_x", 0.42, 0.58),
        Parameter("hole_y", -0.12, 0.12),
        Parameter("clearance", 0.0004, 0.0005),
        Parameter("hole_error", 0.0, 0.005),
    )
    free = ("peg",)
    markers = ("hole",)
    names = (
        *(f"hole_seen_{axis}" for axis in "xyz"),
        *(f"tip_from_hole_{axis}" for axis in "xyz"),
        *(f"peg_from_tool_{axis}" for axis in "xyz"),
    )
    terms: ClassVar[Mapping[str, Term]] = {"above": above, "inserted": inserted}
    weights: ClassVar[Mapping[str, float]] = {"above": 0.4, "inserted": 0.6}
    draws = 6
    horizon = 80
    settle = 40

    def edit(self, spec: mujoco.MjSpec) -> None:
        _peg(spec)
        # Four walls around a square hole; a mocap body, so that each row can put it elsewhere.
        body = spec.worldbody.add_body(name="hole", mocap=True)
        wall = (BLOCK - HOLE) / 2
        middle = HOLE + wall
        for name, half, place in (
            ("right", (wall, BLOCK), (middle, 0.0)),
            ("left", (wall, BLOCK), (-middle, 0.0)),
            ("back", (HOLE, wall), (0.0, middle)),
            ("front", (HOLE, wall), (0.0, -middle)),
        ):
            body.add_geom(
                name=f"wall_{name}",
                type=mujoco.mjtGeom.mjGEOM_BOX,
                size=[*half, TOP / 2],
                pos=[*place, TOP / 2],
                rgba=DARK,
            )

    def shape(self, param: Params) -> dict[tuple[str, str], Floats]:
        radius = HOLE - param["clearance"]
        xp = namespace(radius)
        zero = xp.zeros_like(radius)
        shaft = xp.stack([radius, xp.full_like(radius, 0.018), zero], 1)
        tip = xp.stack([radius - CHAMFER, xp.full_like(radius, 0.02), zero], 1)
        return {("geom_size", "shaft"): shaft, ("geom_size", "tip"): tip}

    def start(self, param: Params, draws: Floats) -> Start:
        count = len(draws)
        xp = namespace(draws)
        zero = xp.zeros_like(draws[:, 0])
        hole = xp.stack([param["hole_x"], param["hole_y"], zero], 1)
        away = spread(draws[:, :3], (-0.05, -0.05, 0.02), (0.05, 0.05, 0.06))
        angle = 2 * math.pi * draws[:, 3]
        wrong = xp.stack([xp.cos(angle), xp.sin(angle), zero], 1)
        slip = spread(draws[:, 4:6], (-0.002, -0.003), (0.002, 0.003))
        held = xp.stack([slip[:, 0], zero, slip[:, 1]], 1)
        ready = hole + constant((0.0, 0.0, TOP - TIP), hole)
        return Start(
            tool=ready + away,
            width=xp.full_like(zero, 2 * HANDLE - 0.0002),
            marker={"hole": hole},
            memory={"wrong": param["hole_error"][:, None] * wrong},
            held={"peg": (held, xp.tile(constant((1.0, 0.0, 0.0, 0.0), held), (count, 1)))},
        )

    def observe(self, view: View) -> Floats:
        seen = _rim(view) + view.memory["wrong"]
        peg = view.place["peg"]
        return namespace(peg).concatenate([seen, tip_from_hole(view), peg - view.tool], 1)

    def success(self, view: View) -> Flags:
        tip = tip_from_hole(view)
        return (tip[:, 2] < -DEPTH) & (_from_axis(tip) < 0.002)

    def describe(self, view: View) -> str:
        tip = 1000 * tip_from_hole(view)[0]
        return (
            f"The peg's tip is {tip[0]:.1f} mm in x, {tip[1]:.1f} mm in y and {tip[2]:.1f} mm in z "
            f"from the middle of the hole's rim; the tool is at {centimetres(view.tool)}."
        )


def _peg(spec: mujoco.MjSpec) -> None:
    """A square handle, a round shaft and a slightly thinner tip."""
    body = add_free(spec, "peg")
    body.add_geom(
        name="handle",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=[HANDLE, HANDLE, 0.015],
        rgba=LIGHT,
        mass=0.03,
        condim=4,
        priority=1,
        friction=[1.5, 0.02, 0.001],
        solref=STIFF,
    )
    for name, radius, half in (("shaft", HOLE, 0.018), ("tip", HOLE - CHAMFER, 0.02)):
        body.add_geom(
            name=name,
            type=CYLINDER,
            size=[radius, half, 0],
            pos=[0, 0, -0.015 - half],
            rgba=LIGHT,
            mass=0.01,
            priority=1,
            friction=[0.2, 0.005, 0.0001],
            solref=STIFF,
        )
