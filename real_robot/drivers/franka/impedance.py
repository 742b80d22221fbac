"""Impedance controllers of a Franka: springs on its joints or on its tool, in C++ at 1 kHz.

A spring gets joint targets, as every stage before it does. On the tool, the joint target is turned
into a tool pose by the arm's own model; the elbow is pulled towards its initial position by torques
that do not move the tool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.build import ConfigError
from real_robot.control.arm_state import Floats
from real_robot.drivers.franka.errors import franky
from real_robot.drivers.franka.limits import Own

NEAR_END = 0.03  # rad before a joint's end at which it is pushed back


@dataclass(frozen=True)
class Tool:
    """`stiffness` of the tool's place (N/m) and of its turn (N m/rad), critically damped; the pull
    of each is at most `force` (N) and `torque` (N m). `elbow` (N m/rad): what holds the rest."""

    stiffness: float = 500.0
    turning: float = 30.0
    force: float = 30.0
    torque: float = 5.0
    elbow: float = 10.0

    def __post_init__(self) -> None:
        values = (self.stiffness, self.turning, self.force, self.torque, self.elbow)
        if not all(0 < value <= 3000 for value in values):
            raise ConfigError("tool: stiffness, turning, force, torque, elbow above 0, up to 3000")


class JointSpring:
    """Torque = `stiffness` (q_d - q) - `damping` dq, of which the first is at most `push`; [7]."""

    def __init__(self, stiffness: Floats, damping: Floats, push: Floats) -> None:
        self.stiffness, self.damping = stiffness, damping
        self.reach = push / stiffness
        self.wish = np.zeros(7)

    def motion(self, robot: Any, own: Own, q: Floats) -> Any:
        """A controller that holds the arm at q [7]."""
        motion = franky.JointImpedanceTrackingMotion(
            stiffness=self.stiffness,
            damping=self.damping,
            lower_joint_limits=own.low,
            upper_joint_limits=own.high,
            joint_limit_activation_distance=NEAR_END,
        )
        motion.set_reference(franky.JointReference(q=q))
        return motion

    def reference(self, q: Floats, here: Floats) -> Any:
        """To q [7], for an arm that is `here` [7]."""
        np.subtract(q, here, out=self.wish)
        np.clip(self.wish, -self.reach, self.reach, out=self.wish)
        self.wish += here
        return franky.JointReference(q=self.wish)


class ToolSpring:
    """The same on the tool's pose."""

    def __init__(self, config: Tool) -> None:
        self.config = config
        self.model: Any = None
        self.frames: tuple[Any, Any] | None = None

    def motion(self, robot: Any, own: Own, q: Floats) -> Any:
        state, config = robot.state, self.config
        self.model, self.frames = robot.model, (state.F_T_EE, state.EE_T_K)
        motion = franky.CartesianImpedanceTrackingMotion(
            translational_stiffness=config.stiffness,
            rotational_stiffness=config.turning,
            translational_error_clip=np.full(3, config.force / config.stiffness),
            rotational_error_clip=np.full(3, config.torque / config.turning),
            posture_task=franky.PostureTask(q, config.elbow),
            lower_joint_limits=own.low,
            upper_joint_limits=own.high,
            joint_limit_activation_distance=NEAR_END,
        )
        motion.set_reference(self.reference(q, q))
        return motion

    def reference(self, q: Floats, here: Floats) -> Any:
        assert self.frames is not None
        pose = self.model.pose(franky.Frame.EndEffector, q, *self.frames)
        return franky.CartesianReference(pose)
