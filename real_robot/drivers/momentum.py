"""MomentumObserver: what pushes on an arm, from its commanded torques and a model of it.

De Luca, Albu-Schaeffer, Haddadin and Hirzinger (2006), with the momentum p = M(q) dq:

    r = K (p - integral of (tau + C' dq - g + r)),   so that  dr/dt = K (tau_ext - r)

From one sample to the next M hardly changes, so p less the integral of C' dq changes by M times the
change of dq less C dq: neither an acceleration nor a derivative of M is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from embodied.real_robot.kernel.arm_state import Floats

BANDWIDTH = 100.0  # 1/s
STICKS = 0.05  # rad/s below which Coulomb friction is taken as smaller


class MomentumObserver:
    """Call `step` with the torques of every step of the controller, `update` with a sample of the
    motion now and then. `external` [n] are the estimated external joint torques, N m."""

    def __init__(self, n: int, bandwidth: float = BANDWIDTH) -> None:
        self.bandwidth = bandwidth
        self.external = np.zeros(n)
        self._dq = np.zeros(n)
        self._known = np.zeros(n)
        self._steps = 0

    def step(self, bias: Floats, torque: Floats) -> None:
        """Note the torques [n] of a step: what motion and gravity need (`bias`: C dq + g, friction
        included), and what was commanded."""
        self._known += bias - torque
        self._steps += 1

    def update(self, inertia: Floats, dq: Floats, period: float) -> None:
        """Estimate anew from the joint-space `inertia` [n, n] and the measured `dq` [n], where a
        step takes `period` s."""
        if not self._steps:
            return
        dt = self._steps * period
        pushed = inertia @ (dq - self._dq) / dt + self._known / self._steps
        self.external += (1 - np.exp(-self.bandwidth * dt)) * (pushed - self.external)
        self._dq = dq.copy()
        self._known[:] = 0
        self._steps = 0


def mujoco_bias(model: Any, data: Any, dofs: Sequence[int]) -> Floats:
    """`bias` [n] of the joints `dofs` of a MuJoCo model, whose passive forces (damping, compensated
    gravity) and Coulomb friction are known."""
    friction = model.dof_frictionloss[dofs] * np.tanh(data.qvel[dofs] / STICKS)
    return data.qfrc_bias[dofs] - data.qfrc_passive[dofs] + friction


def mujoco_inertia(model: Any, data: Any, dofs: Sequence[int]) -> Floats:
    """The joint-space inertia [n, n] of the joints `dofs` of a MuJoCo model."""
    inertia = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, data, inertia)
    return inertia[np.ix_(dofs, dofs)]
