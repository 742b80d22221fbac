"""A finger between the jaws of the simulated FR3, and the force with which they press on it: a
`world` of the driver `Sim`, after `allow("tests")`; the deployment then has `sensed: [SENSED]`."""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from embodied.embodiments import fr3
from embodied.real_robot.drivers.sim import World, arm_spec
from embodied.real_robot.kernel.arm_state import Floats
from tests.real_robot.plate import pressed

SENSED = "finger_force"
STIFFNESS, DAMPING, STRENGTH = 6000.0, 60.0, 70.0
"""Of the hand of training (`embodied.envs.fr3.base`), N/m, N s/m and N; half goes to each jaw."""


@dataclass(frozen=True)
class Config:
    """Settings of a finger."""

    thick: float = 0.02  # m; 0: nothing is between the jaws


class Jaws(World):
    """A World of the driver `Sim`: the manufacturer's FR3 with the hand of training, and a bar of
    100 g that floats between its jaws. `sense` gives the normal force of one jaw on it, N."""

    names = (SENSED,)

    def __init__(self, config: Config) -> None:
        self.config = config

    def compile(self) -> mujoco.MjModel:
        spec = arm_spec()
        for finger in map(spec.joint, fr3.FINGERS):
            finger.armature, finger.frictionloss, finger.damping[0] = 0.1, 0.0, 10.0
        hand = spec.actuator("hand")
        hand.inheritrange = 0
        hand.gainprm[0] = STIFFNESS
        hand.biasprm[1:3] = -STIFFNESS, -DAMPING
        hand.ctrlrange = [0.0, fr3.OPEN / 2]
        hand.forcerange = [-STRENGTH, STRENGTH]
        if self.config.thick:
            bar = spec.worldbody.add_body(name="bar", gravcomp=1.0)
            bar.add_freejoint(name="bar")
            half = [0.01, self.config.thick / 2, 0.01]
            bar.add_geom(name="bar", type=mujoco.mjtGeom.mjGEOM_BOX, size=half, mass=0.1)
        self.model = spec.compile()
        return self.model

    def begin(
        self, model: mujoco.MjModel, data: mujoco.MjData, random: np.random.Generator
    ) -> None:
        """Open the hand, and put the bar between its jaws, wherever it is."""
        for name in fr3.FINGERS:
            data.qpos[model.joint(name).qposadr[0]] = fr3.OPEN / 2
        if not self.config.thick:
            return
        mujoco.mj_kinematics(model, data)
        at = model.joint("bar").qposadr[0]
        hand = data.body("hand")
        data.qpos[at : at + 3] = hand.xpos + hand.xmat.reshape(3, 3) @ [0.0, 0.0, fr3.TOOL]
        data.qpos[at + 3 : at + 7] = hand.xquat
        data.qvel[model.joint("bar").dofadr[0] :][:6] = 0.0

    def sense(self, data: mujoco.MjData) -> Floats:
        if not self.config.thick:
            return np.zeros(1)
        bar, jaw = self.model.geom("bar").id, self.model.body("left_finger").id
        return np.array([pressed(self.model, data, bar, jaw)])
