"""Course: slide the closed fingers between boxes to a goal without rising above the boxes.

The table is a grid of 6 x 6 cells of five centimetres, each empty or with a box. The task vector is
the level in the format of `embodied.envs.maze.levels`: box or free for each cell (rows ordered away
from the robot), then the start cell and the goal cell. The last element is not used here.
"""

from __future__ import annotations

import mujoco

from embodied.embodiments.arrays import constant, namespace
from embodied.envs.fr3.tasks.goal import GoalTask
from embodied.envs.fr3.tasks.task import Flags, Floats, Parameter, Params, Start, View, spread

SIDE = 6
CELL = 0.05
NEAR = (0.375, -0.125)
"""The middle of the first cell."""
HALF = (0.023, 0.023, 0.025)
LAYER = 0.025
LID = 0.045
"""Height of the tool point where it belongs, and where the episode is lost."""
AWAY = -1.0  # position of unused boxes, below the table
CLOSE = 0.02
CELLS = tuple((row, column) for row in range(SIDE) for column in range(SIDE))
BOXES = tuple(f"box_{row}_{column}" for row, column in CELLS)
WALLS = tuple(f"wall_{row}_{column}" for row, column in CELLS)


def boxes(param: Params) -> Flags:
    """[n, 36]: which cells have a box; never the start or the goal."""
    xp = namespace(param["start"])
    asked = xp.stack([param[name] for name in WALLS], 1) >= 0.5
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
    close = CLOSE
    horizon = 80

    def edit(self, spec: mujoco.MjSpec) -> None:
        super().edit(spec)
        for name in BOXES:
            body = spec.worldbody.add_body(name=name, mocap=True)
            body.add_geom(
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
