"""A plate in front of the simulated FR3, and the force with which the arm presses on it.

As a driver's settings: `{"_target_": "embodied.real_robot.drivers.sim.Sim", "world": {"_target_":
"tests.real_robot.plate.Plate", "height": 0.45}}` after `embodied.core.build.allow("tests")`; the
deployment's `sensed` is then `["plate_force"]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from embodied.embodiments import fr3
from embodied.real_robot.drivers.sim import World, arm_spec
from embodied.real_robot.kernel.arm_state import Floats

SENSED = "plate_force"
FRANKA_STIFFNESS = (600.0, 600.0, 600.0, 600.0, 250.0, 150.0, 50.0)
"""The driver's for a real Franka, N m/rad (`embodied.real_robot.drivers.franka.driver.Config`)."""
FRANKA_DAMPING = (50.0, 50.0, 50.0, 50.0, 30.0, 25.0, 15.0)


@dataclass(frozen=True)
class Config:
    """`height`: of the plate's upper side, m in the base frame; the tool point at the home pose is
    at 0.487 m. `stiffness`, `damping`: the joint impedance (N m/rad, N m s/rad)."""

    height: float = 0.45
    stiffness: tuple[float, ...] = fr3.STIFFNESS
    damping: tuple[float, ...] = fr3.DAMPING


class Plate(World):
    """A World of the driver `Sim`: the manufacturer's FR3 above a rigid horizontal plate. `sense`
    gives the sum of the normal forces on the plate, N, as MuJoCo's contacts have them."""

    names = (SENSED,)

    def __init__(self, config: Config) -> None:
        self.config = config

    def compile(self) -> mujoco.MjModel:
        spec = arm_spec(self.config.stiffness, self.config.damping)
        spec.worldbody.add_geom(
            name="plate",
            type=mujoco.mjtGeom.mjGEOM_BOX,
            size=[0.3, 0.5, 0.02],
            pos=[0.55, 0.0, self.config.height - 0.02],
        )
        self.model = spec.compile()
        self.plate = self.model.geom("plate").id
        return self.model

    def begin(
        self, model: mujoco.MjModel, data: mujoco.MjData, random: np.random.Generator
    ) -> None:
        """Nothing is laid out."""

    def sense(self, data: mujoco.MjData) -> Floats:
        force, total = np.zeros(6), 0.0
        for i in range(data.ncon):
            if self.plate in data.contact.geom[i]:
                mujoco.mj_contactForce(self.model, data, i, force)
                total += float(force[0])
        return np.array([total])
