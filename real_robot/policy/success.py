"""Success detection from measurements, where the deployment says how."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from embodied.real_robot.assemble import forward_kinematics
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.deployment import Deployment

SENSED = "success"
GOAL = ("goal_x", "goal_y", "goal_z")


class Success:
    """Success as it is sensed by that name; else the tool within `goal_within` m of the goal
    that is given or sensed; else it is not known (None)."""

    def __init__(self, deployment: Deployment) -> None:
        self.sensed = deployment.sensed
        self.within = deployment.goal_within
        self.given = deployment.given
        self.forward = forward_kinematics(deployment)
        has = {*deployment.given, *deployment.sensed}
        self.known = SENSED in self.sensed or (self.within is not None and {*GOAL} <= has)

    def __call__(self, q: Floats, sensed: Iterable[float]) -> bool | None:
        """Success at joints `q` [n] and the sensed numbers."""
        if not self.known:
            return None
        values = {**self.given, **dict(zip(self.sensed, sensed, strict=True))}
        if SENSED in self.sensed:
            return values[SENSED] > 0.5
        assert self.within is not None
        goal = np.array([values[name] for name in GOAL])
        return float(np.linalg.norm(self.forward(q[None])[0] - goal)) < self.within
