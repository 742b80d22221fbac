"""Joint parameters of the simulated FR3, per joint: stiffness, damping, friction, armature.

tau = stiffness (target - q) - damping dq,   less friction sign(dq);   inertia + armature
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mujoco
import numpy as np

from embodied.core.bounds import NonNegative
from embodied.core.build import ConfigError, nearest
from embodied.embodiments import fr3

QUANTITIES = {
    "stiffness": "N m/rad",
    "damping": "N m s/rad",
    "friction": "N m",
    "armature": "kg m2",
}
"""Each has seven values, and its unit. `friction` is that of the joint (Coulomb), `damping` that of
the controller."""
JointValues = tuple[NonNegative, ...]  # one value of each of the seven joints
Arm = Mapping[str, Sequence[float]]


def read(model: mujoco.MjModel) -> dict[str, list[float]]:
    """The joint parameters of `model`."""
    dofs, servos = _addresses(model)
    return {
        "stiffness": model.actuator_gainprm[servos, 0].tolist(),
        "damping": (-model.actuator_biasprm[servos, 2]).tolist(),
        "friction": model.dof_frictionloss[dofs].tolist(),
        "armature": model.dof_armature[dofs].tolist(),
    }


def write(model: mujoco.MjModel, arm: Arm) -> None:
    """Set the joint parameters `arm` in `model`; others stay unchanged. Raises ConfigError."""
    dofs, servos = _addresses(model)
    for name, given in arm.items():
        values = np.asarray(given, np.float64)
        if name not in QUANTITIES:
            raise ConfigError(f'arm: unknown quantity "{name}"{nearest(name, QUANTITIES)}')
        if values.shape != (len(fr3.JOINTS),) or not (values >= 0).all():
            raise ConfigError(f"arm.{name} must be seven numbers of 0 or more, got {given}")
        if name == "stiffness":
            model.actuator_gainprm[servos, 0] = values
            model.actuator_biasprm[servos, 1] = -values
        elif name == "damping":
            model.actuator_biasprm[servos, 2] = -values
        elif name == "friction":
            model.dof_frictionloss[dofs] = values
        else:
            model.dof_armature[dofs] = values
    if "armature" in arm:
        mujoco.mj_setConst(model, mujoco.MjData(model))


def _addresses(model: mujoco.MjModel) -> tuple[list[int], list[int]]:
    dofs = [int(model.joint(name).dofadr[0]) for name in fr3.JOINTS]
    return dofs, [int(model.actuator(name).id) for name in fr3.JOINTS]
