"""Tasks whose tool point has to get to a goal: reach, channel, course.

Channel: move the tool through the gap between two walls to a goal behind them. The straight way
from every initial position to the goal is through the first wall. Touch sensors on the hand and the
fingers measure how hard the arm presses on walls and table.

Course: slide the closed fingers between boxes to a goal without rising above the boxes. The table
is a grid of 6 x 6 cells of five centimetres, each empty or with a box. The task vector is the level
in the format of `embodied.envs.maze.levels`: box or free for each cell (rows ordered away from the
robot), then the start cell and the goal cell. The last element is not used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mujoco

from embodied.embodiments.arrays import constant, namespace
from embodied.envs.fr3.tasks.task import (
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


class Reach(GoalTask):
    """Success: the tool point is within two centimetres of the goal."""

    text = "move the tool to the green ball"
    parameters = (
        Parameter("goal_x", 0.35, 0.65),
        Parameter("goal_y", -0.25, 0.25),
        Parameter("goal_z", 0.08, 0.40),
    )
    close = 0.02
    tool_low = (0.38, -0.20, 0.12)
    tool_high = (0.60, 0.20, 0.35)
    horizon = 50


BEFORE = (0.57, -0.13, 0.15)
BEHIND = (0.57, 0.13, 0.15)
"""The way through the gap, from where to where the 20 cm wide hand is between the walls, m."""
GAP = (0.50, 0.74)
"""x of the walls' ends, m. A hand that only turns about the base meets the near wall from most
initial positions."""
WALL_HEIGHT = 0.35
WALL_THICKNESS = 0.04
SOFT_WALL = (0.05, 1.0)
"""Contact time constant (s) and damping ratio: padded walls, so that light contact is possible."""
NEAR_END = 0.30  # x of the walls' outer end near the robot, m
FAR_END = 0.85  # x of the far outer end, m
TOUCH = ("hand", "left_finger", "right_finger")
"""Bodies with touch sensors, each named `BODY_touch`."""


class Channel(GoalTask):
    """Success: the tool point is within four centimetres of the goal."""

    text = "move the tool through the gap to the green ball, and press on nothing hard"
    parameters = (
        Parameter("goal_x", 0.42, 0.52),
        Parameter("goal_y", 0.20, 0.24),
        Parameter("goal_z", 0.12, 0.18),
    )
    close = 0.04
    tool_low = (0.42, -0.24, 0.12)
    tool_high = (0.52, -0.20, 0.18)
    touch = tuple(f"{body}_touch" for body in TOUCH)
    horizon = 100

    def edit(self, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        _add_wall(spec, "near_wall", NEAR_END, GAP[0])
        _add_wall(spec, "far_wall", GAP[1], FAR_END)
        for body in TOUCH:
            # The sum of the normal forces (N) of all contacts of `body`.
            name = f"{body}_touch"
            spec.body(body).add_site(
                name=name, type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[0.5, 0, 0], group=5
            )
            spec.add_sensor(
                name=name,
                type=mujoco.mjtSensor.mjSENS_TOUCH,
                objtype=mujoco.mjtObj.mjOBJ_SITE,
                objname=name,
            )

    def describe(self, view: View) -> str:
        gap = centimetres(_point(BEFORE, view.tool))
        return f"{self.where(view)}, the gap begins at {gap}."


def path_length(view: View) -> Floats:
    """Length [n] (m) of the way from the tool point to the goal through the middle of the gap."""
    xp = namespace(view.tool)
    goal = view.place["goal"]
    before, behind = (_point(point, view.tool) for point in (BEFORE, BEHIND))
    last = distance(view.tool, goal)
    through = distance(view.tool, behind) + distance(behind, goal)
    first = distance(view.tool, before) + distance(before, behind) + distance(behind, goal)
    y = view.tool[:, 1]
    return xp.where(y < BEFORE[1], first, xp.where(y < BEHIND[1], through, last))


def _point(point: tuple[float, float, float], like: Floats) -> Floats:
    """The same point [n, 3] for each of `like` [n, 3]."""
    return constant(point, like)[None] + namespace(like).zeros_like(like)


def _add_wall(spec: mujoco.MjSpec, name: str, low: float, high: float) -> None:
    spec.worldbody.add_geom(
        name=name,
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=[(high - low) / 2, WALL_THICKNESS / 2, WALL_HEIGHT / 2],
        pos=[(low + high) / 2, 0.0, WALL_HEIGHT / 2],
        rgba=[0.35, 0.37, 0.42, 1.0],
        friction=[0.3, 0.005, 0.0001],
        solref=SOFT_WALL,
        priority=1,
    )


SIDE = 6
CELL = 0.05
NEAR = (0.375, -0.125)
"""The middle of the first cell."""
HALF = (0.023, 0.023, 0.025)
LAYER = 0.025
LID = 0.045
"""Height of the tool point where it belongs, and where the episode is lost."""
AWAY = -1.0  # position of unused boxes, below the table
CELLS = tuple((row, column) for row in range(SIDE) for column in range(SIDE))
BOXES = tuple(f"box_{row}_{column}" for row, column in CELLS)
WALLS = tuple(f"wall_{row}_{column}" for row, column in CELLS)


def boxes(param: Params) -> Flags:
    """[n, 36]: which cells have a box; never the start or the goal."""
    asked = namespace(param["start"]).stack([param[name] for name in WALLS], 1) >= 0.5
    cells = constant(tuple(range(SIDE * SIDE)), param["start"])[None]
    start, goal = ends(param)
    return asked & (cells != start[:, None]) & (cells != goal[:, None])


def ends(param: Params) -> tuple[Floats, Floats]:
    """Start and goal cells, [n] each; a goal on the start is moved to the next cell."""
    xp = namespace(param["start"])
    count = SIDE * SIDE
    start, goal = (
        xp.clip(xp.floor(param[name] * count + 1e-3), 0, count - 1) for name in ("start", "goal")
    )
    return start, xp.where(start == goal, (goal + 1) % count, goal)


def middle(cell: Floats) -> Floats:
    """Points [n, 3] in the fingers' layer, in the middle of cells [n]."""
    xp = namespace(cell)
    row = xp.floor(cell / SIDE)
    place = (NEAR[0] + CELL * row, NEAR[1] + CELL * (cell - SIDE * row))
    return xp.stack([*place, xp.full_like(row, LAYER)], 1)


class Course(GoalTask):
    """Success: the tool point is within two centimetres of the goal without having left
    the layer.
    """

    text = "move the fingers between the boxes to the green ball"
    parameters = tuple(
        Parameter(name, 0.0, 1.0, "") for name in (*WALLS, "start", "goal", "facing")
    )
    markers = ("goal", *BOXES)
    names = (*GoalTask.names, *BOXES)
    close = 0.02
    horizon = 80

    def edit(self, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        for name in BOXES:
            spec.worldbody.add_body(name=name, mocap=True).add_geom(
                name=name,
                type=mujoco.mjtGeom.mjGEOM_BOX,
                size=HALF,
                rgba=(0.33, 0.37, 0.45, 1.0),
                friction=[0.2, 0.005, 0.0001],
            )

    def start(self, param: Params, draws: Floats) -> Start:
        xp = namespace(draws)
        begin, goal = (middle(cell) for cell in ends(param))
        there = boxes(param)
        marker = {"goal": goal}
        for i, name in enumerate(BOXES):
            place = middle(xp.full_like(begin[:, 0], float(i)))
            height = xp.where(there[:, i], HALF[2], AWAY)
            marker[name] = xp.stack([place[:, 0], place[:, 1], height], 1)
        tool = begin + spread(draws, (-0.006, -0.006, -0.004), (0.006, 0.006, 0.004))
        return Start(tool, xp.zeros_like(draws[:, 0]), marker=marker)

    def observe(self, view: View) -> Floats:
        there = [view.place[name][:, 2:] > 0 for name in BOXES]
        xp = namespace(view.tool)
        shown = xp.concatenate(there, 1) * xp.ones_like(view.tool[:, :1])
        return xp.concatenate([super().observe(view), shown], 1)

    def lost(self, view: View) -> Flags:
        """[n]: the tool point is above the lid."""
        return view.tool[:, 2] > LID

    def describe(self, view: View) -> str:
        there = sum(int(view.place[name][0, 2] > 0) for name in BOXES)
        return f"{self.where(view)}; {there} boxes stand in the field."
