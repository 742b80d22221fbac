"""A plate in front of the simulated FR3, and the force with which the arm presses on it: a `world`
of the driver `Sim`, after `allow("tests")`; the deployment's `sensed` is then `[SENSED]`."""

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
    """Settings of a plate, and of the arm's joint impedance."""

    height: float = 0.45  # m of its upper side; the tool point at the home pose is at 0.487 m
    stiffness: tuple[float, ...] = fr3.STIFFNESS  # N m/rad
    damping: tuple[float, ...] = fr3.DAMPING  # N m s/rad


def pressed(
    model: mujoco.MjModel, data: mujoco.MjData, geom: int, body: int | None = None
) -> float:
    """Sum of the normal forces on `geom` (of `body` only, where it is named), N."""
    force, total = np.zeros(6), 0.0
    for i in range(data.ncon):
        geoms = data.contact.geom[i]
        if geom in geoms and (body is None or body in model.geom_bodyid[geoms]):
            mujoco.mj_contactForce(model, data, i, force)
            total += float(force[0])
    return total


class Plate(World):
    """A World of the driver `Sim`: the manufacturer's FR3 above a rigid horizontal plate. `sense`
    gives the sum of the normal forces on the plate, N, as MuJoCo's contacts have them."""

    names = (SENSED,)

    def __init__(self, config: Config) -> None:
        self.config = config

    def compile(self) -> mujoco.MjModel:
        spec = arm_spec(self.config.stiffness, self.config.damping)
        box, place = mujoco.mjtGeom.mjGEOM_BOX, [0.55, 0.0, self.config.height - 0.02]
        spec.worldbody.add_geom(name="plate", type=box, size=[0.3, 0.5, 0.02], pos=place)
        self.model = spec.compile()
        self.plate = self.model.geom("plate").id
        return self.model

    def begin(
        self, model: mujoco.MjModel, data: mujoco.MjData, random: np.random.Generator
    ) -> None:
        """Nothing is laid out."""

    def sense(self, data: mujoco.MjData) -> Floats:
        return np.array([pressed(self.model, data, self.plate)])
