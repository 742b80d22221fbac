"""Reach: move the tool point to a goal position in the air."""

from __future__ import annotations

from embodied.envs.fr3.tasks.goal import GoalTask
from embodied.envs.fr3.tasks.task import Parameter

CLOSE = 0.02


class Reach(GoalTask):
    """Success: the tool point is within two centimetres of the goal."""

    text = "move the tool to the green ball"
    parameters = (
        Parameter("goal_x", 0.35, 0.65),
        Parameter("goal_y", -0.25, 0.25),
        Parameter("goal_z", 0.08, 0.40),
    )
    close = CLOSE
    tool_low = (0.38, -0.20, 0.12)
    tool_high = (0.60, 0.20, 0.35)
    horizon = 50
