"""Impedance controllers of a Franka: springs on its joints or on its tool, in C++ at 1 kHz.

A spring gets joint targets, as every stage before it does. On the tool, the joint target is turned
into a tool pose by the arm's own model; the elbow is pulled towards its initial position by torques
that do not move the tool.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.drivers.franka.errors import franky
from embodied.real_robot.drivers.franka.limits import Own
from embodied.real_robot.drivers.springs import Springs, Tool, damped, tool_springs

NEAR_END = 0.03  # rad before a joint's end at which it is pushed back
GUIDED = 0.1  # of its damping: what a released arm keeps
SMOOTHED = 0.02  # s: the time constant with which another stiffness sets in


class JointSpring:
    """Torque = `stiffness` (q_d - q) - `damping` dq, of which the first is at most `push`; [7]."""

    def __init__(self, stiffness: Floats, damping: Floats, push: Floats) -> None:
        self.reach = push / stiffness
        self.springs = Springs("joints", stiffness, damping, self.reach)
        self.wish = np.zeros(7)

    def motion(self, robot: Any, own: Own, q: Floats) -> Any:
        """A controller that holds the arm at q [7]."""
        motion = franky.JointImpedanceTrackingMotion(
            stiffness=self.springs.stiffness,
            damping=self.springs.damping,
            gains_time_constant=SMOOTHED,
            lower_joint_limits=own.low,
            upper_joint_limits=own.high,
            joint_limit_activation_distance=NEAR_END,
        )
        motion.set_reference(franky.JointReference(q=q))
        return motion

    def gains(self, stiffness: Floats) -> Any:
        """Gains for `set_gains`, of another stiffness [7]."""
        return franky.JointImpedanceGains(stiffness, damped(self.springs, stiffness))

    def release(self, motion: Any) -> None:
        """Take the springs off `motion`: a person moves the arm against a little damping."""
        motion.set_gains(franky.JointImpedanceGains(np.zeros(7), GUIDED * self.springs.damping))

    def engage(self, motion: Any, here: Floats) -> None:
        """The springs again, at `here` [7]."""
        motion.set_reference(self.reference(here, here))
        motion.set_gains(self.gains(self.springs.stiffness))

    def reference(self, q: Floats, here: Floats) -> Any:
        """The reference for targets `q` [7], of an arm that is `here` [7]."""
        np.subtract(q, here, out=self.wish)
        np.clip(self.wish, -self.reach, self.reach, out=self.wish)
        self.wish += here
        return franky.JointReference(q=self.wish)


class ToolSpring:
    """Springs on the tool's pose."""

    def __init__(self, config: Tool) -> None:
        self.config = config
        self.springs = tool_springs(config)
        self.model: Any = None
        self.frames: tuple[Any, Any] | None = None

    def motion(self, robot: Any, own: Own, q: Floats) -> Any:
        state, config = robot.state, self.config
        self.model = robot.model
        self.frames = (state.F_T_EE, state.EE_T_K)
        motion = franky.CartesianImpedanceTrackingMotion(
            translational_stiffness=config.stiffness,
            rotational_stiffness=config.turning,
            translational_error_clip=np.full(3, config.force / config.stiffness),
            rotational_error_clip=np.full(3, config.torque / config.turning),
            gains_time_constant=SMOOTHED,
            posture_task=franky.PostureTask(q, config.elbow),
            lower_joint_limits=own.low,
            upper_joint_limits=own.high,
            joint_limit_activation_distance=NEAR_END,
        )
        motion.set_reference(self.reference(q, q))
        return motion

    def gains(self, stiffness: Floats) -> Any:
        return franky.CartesianImpedanceGains.diagonal(stiffness, damped(self.springs, stiffness))

    def release(self, motion: Any) -> None:
        damping = GUIDED * self.springs.damping
        motion.set_gains(franky.CartesianImpedanceGains.diagonal(np.zeros(6), damping))
        motion.set_nullspace_gains(self._elbow(0.0))

    def engage(self, motion: Any, here: Floats) -> None:
        motion.set_reference(self.reference(here, here))
        motion.set_gains(self.gains(self.springs.stiffness))
        motion.set_nullspace_gains(self._elbow(self.config.elbow))

    def _elbow(self, stiffness: float) -> Any:
        gains = franky.NullspaceGains()
        gains.posture_stiffness = np.full(7, stiffness)
        return gains

    def reference(self, q: Floats, here: Floats) -> Any:
        assert self.frames is not None
        pose = self.model.pose(franky.Frame.EndEffector, q, *self.frames)
        return franky.CartesianReference(pose)
