"""What simulated arms share: physics in real time, and a momentum observer of what pushes on them.

The observer: De Luca, Albu-Schaeffer, Haddadin and Hirzinger (2006), with the momentum
p = M(q) dq, the commanded torques tau and a model of the arm:

    r = K (p - integral of (tau + C' dq - g + r)),   so that  dr/dt = K (tau_ext - r)

From one sample to the next M hardly changes, so p less the integral of C' dq changes by M times the
change of dq less C dq: neither an acceleration nor a derivative of M is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import numpy as np

from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError

BEHIND = 0.25  # s of physics that are caught up with at most: after a stall the world goes on late
BANDWIDTH = 100.0  # 1/s
STICKS = 0.05  # rad/s below which Coulomb friction is taken as smaller


class MomentumObserver:
    """Call `step` with the torques of every step of the controller, `update` with a sample of the
    motion now and then. `external` [n] are the estimated external joint torques, N m."""

    def __init__(self, n: int) -> None:
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
        self.external += (1 - np.exp(-BANDWIDTH * dt)) * (pushed - self.external)
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


class SimulatedArm(Driver):
    """An arm in MuJoCo: every read and write first catches up with the clock. `at`, `dof` and
    `servos` are the addresses of its joints' positions, velocities and actuators."""

    def __init__(self, noise: float, seed: int, clock: Callable[[], float]) -> None:
        self.noise = noise  # standard deviation of measured positions, rad (m)
        self.random = np.random.default_rng(seed)
        self.clock = clock
        self.connected = False

    def take_model(self, model: Any) -> None:
        """Go on with `model`, whose joints and actuators are named as in `joints`."""
        self.model = model
        self.data = mujoco.MjData(model)
        self.at = [model.joint(name).qposadr[0] for name in self.joints]
        self.dof = [model.joint(name).dofadr[0] for name in self.joints]
        self.servos = [model.actuator(name).id for name in self.joints]

    def start_clock(self) -> None:
        """Let time run from now on."""
        mujoco.mj_forward(self.model, self.data)
        self.observer = MomentumObserver(len(self.dof))
        self.last = self.clock()
        self.connected = True

    def read(self) -> ArmState:
        now = self._run()
        q = self.data.qpos[self.at] + self.random.normal(0, self.noise, len(self.at))
        dq = self.data.qvel[self.dof].copy()
        inertia = mujoco_inertia(self.model, self.data, self.dof)
        self.observer.update(inertia, dq, self.model.opt.timestep)
        torque = self.data.actuator_force[self.servos].copy()
        return ArmState(q, dq, torque, now, external=self.observer.external.copy())

    def close(self) -> None:
        self.connected = False

    def _run(self) -> float:
        """Let physics catch up with the clock."""
        now = self.clock()
        if not self.connected:
            raise DriverError("the simulated arm is not connected")
        self.last = min(max(self.last, now - BEHIND), now)  # the clock may go back
        for _ in range(int((now - self.last) / self.model.opt.timestep)):
            self._step()
        return now

    def _step(self) -> None:
        """Run one step of the physics."""
        mujoco.mj_step(self.model, self.data)
        bias = mujoco_bias(self.model, self.data, self.dof)
        self.observer.step(bias, self.data.actuator_force[self.servos])
        self.last += self.model.opt.timestep
