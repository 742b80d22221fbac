"""Channel: move the tool through the gap between two walls to a goal behind them.

The straight way from every initial position to the goal is through the first wall. Touch sensors on
the hand and the fingers measure how hard the arm presses on walls and table.
"""

from __future__ import annotations

import mujoco

from embodied.embodiments.arrays import constant, namespace
from embodied.envs.fr3.tasks.goal import GoalTask
from embodied.envs.fr3.tasks.task import Floats, Parameter, View, centimetres, distance

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
CLOSE = 0.04
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
    close = CLOSE
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
