"""Springs that hold the simulated FR3: on its joints (MuJoCo's own servos), or on its tool.

    torque = J' (K clip(e) - D v) + (1 - J' (J J' + c)^-1 J) (k (q_0 - q) - 2 sqrt(k) dq)

for springs on the tool, at every step of the physics, J at the tool; e is the tool's distance from
where the joint target would put it, q_0 the posture in which the arm was connected. Gravity is
compensated by the physics, as the real robot does itself.
"""

from __future__ import annotations

from typing import Protocol

import mujoco
import numpy as np

from embodied.embodiments import fr3
from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.drivers.springs import Springs, Tool, tool_springs

SMALL = 1e-4  # c: near a singularity the posture's torques fade out


class Holds(Protocol):
    """Holds an arm that is compiled into `model` between two commands."""

    springs: Springs

    def aim(self, q: Floats) -> None:
        """Put the springs' rest to joint targets [7] (rad)."""
        ...

    def gains(self, stiffness: Floats, damping: Floats) -> None:
        """Set stiffness and damping [m] of the springs; zero stiffness lets go."""
        ...

    def run(self, steps: int) -> None:
        """Run `steps` steps of the physics."""
        ...


class Arm:
    """The FR3 in a compiled model: addresses of its joints' positions, velocities and servos."""

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        self.model = model
        self.data = data
        self.at = [model.joint(name).qposadr[0] for name in fr3.JOINTS]
        self.dof = [model.joint(name).dofadr[0] for name in fr3.JOINTS]
        self.servos = [model.actuator(name).id for name in fr3.JOINTS]
        # No world gives the arm more strength than it has.
        model.actuator_forcelimited[self.servos] = 1
        model.actuator_forcerange[self.servos] = np.stack([-fr3.TORQUE, fr3.TORQUE], 1)


class JointHold:
    """The servos as the model has them."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        model = arm.model
        stiffness = model.actuator_gainprm[arm.servos, 0].copy()
        damping = -model.actuator_biasprm[arm.servos, 2]
        self.springs = Springs("joints", stiffness, damping, np.full(len(stiffness), np.inf))

    def aim(self, q: Floats) -> None:
        self.arm.data.ctrl[self.arm.servos] = q

    def gains(self, stiffness: Floats, damping: Floats) -> None:
        model, servos = self.arm.model, self.arm.servos
        model.actuator_gainprm[servos, 0] = stiffness
        model.actuator_biasprm[servos, 1] = -stiffness
        model.actuator_biasprm[servos, 2] = -damping

    def run(self, steps: int) -> None:
        mujoco.mj_step(self.arm.model, self.arm.data, steps)


class ToolHold:
    """The servos become motors, whose torques are computed here."""

    def __init__(self, arm: Arm, tool: Tool) -> None:
        self.arm = arm
        self.springs = tool_springs(tool)
        self.stiffness = self.springs.stiffness
        self.damping = self.springs.damping
        self.elbow = tool.elbow
        self.posture = arm.data.qpos[arm.at].copy()
        model = arm.model
        model.actuator_gainprm[arm.servos, 0] = 1.0
        model.actuator_biasprm[arm.servos, :3] = 0.0
        model.actuator_ctrllimited[arm.servos] = 0
        self.aim(self.posture)

    def aim(self, q: Floats) -> None:
        self.place, self.turn, _ = fr3.forward(q[None])

    def gains(self, stiffness: Floats, damping: Floats) -> None:
        self.stiffness = stiffness
        self.damping = damping

    def run(self, steps: int) -> None:
        model = self.arm.model
        data = self.arm.data
        servos = self.arm.servos
        for _ in range(steps):
            data.ctrl[servos] = self.torque()
            mujoco.mj_step(model, data)

    def torque(self) -> Floats:
        """Joint torques [7] (N m) at the present state."""
        q, dq = self.arm.data.qpos[self.arm.at], self.arm.data.qvel[self.arm.dof]
        place, turn, jacobians = fr3.forward(q[None])
        jacobian, stretch = jacobians[0], self.springs.stretch
        e = np.concatenate([self.place - place, fr3.rotation_error(self.turn, turn)], 1)[0]
        pull = self.stiffness * np.clip(e, -stretch, stretch) - self.damping * (jacobian @ dq)
        held = self.elbow * (self.stiffness.any())  # a released arm has no posture to keep
        rest = held * (self.posture - q) - 2 * held**0.5 * dq
        inertia: Floats = jacobian @ jacobian.T + SMALL * np.eye(6)
        across = np.linalg.solve(inertia, np.asarray(jacobian @ rest, float))
        torque: Floats = jacobian.T @ (pull - across) + rest
        return torque
