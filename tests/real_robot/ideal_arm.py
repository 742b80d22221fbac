"""An arm that is where it was sent a tick before, and can fail in every way that a driver may."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from embodied.core.bounds import Number
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError


@dataclass(frozen=True)
class Config:
    """Settings of an ideal arm."""

    start: tuple[Number, ...]  # where its joints stand at first [n], rad (m)
    low: tuple[Number, ...]  # where a person may lead it [n], rad (m)
    high: tuple[Number, ...]  # where a person may lead it [n], rad (m)
    blow: tuple[Number, ...]  # joint torques [n] of a blow, N m (N)


class IdealArm(Driver):
    """`broken`: nothing is measured. `deaf`: nothing is taken. `lying`: it measures NaN. `struck`:
    it measures the blow's torques. `led`: speed (rad/s, m/s) at which a person leads it while it is
    released."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.joints = tuple(f"joint{i + 1}" for i in range(len(config.start)))
        self.clock = time.monotonic
        self.q = np.array(config.start, float)
        self.goal = self.q.copy()
        self.before = -np.inf
        self.broken = self.deaf = self.lying = self.struck = self.free = False
        self.led = 0.0

    def connect(self) -> None:
        """It is there."""

    def read(self) -> ArmState:
        if self.broken:
            raise DriverError("the wire of the ideal arm is broken")
        now = self.clock()
        passed = now - self.before
        if self.free:
            self.goal = np.clip(self.q + self.led * passed, self.config.low, self.config.high)
        dq = (self.goal - self.q) / passed if passed > 0 else np.zeros(len(self.q))
        self.before = now
        self.q = self.goal.copy()
        tau = np.array(self.config.blow) if self.struck else np.zeros(len(self.q))
        q = np.full(len(self.q), np.nan) if self.lying else self.q
        return ArmState(q.copy(), dq, tau, now, external=np.zeros(len(q)))

    def write(self, q: Floats, width: float) -> None:
        assert np.isfinite(q).all() and not self.free, "nothing else is ever sent"
        if self.deaf:
            raise DriverError("the ideal arm takes nothing")
        self.goal = q.copy()

    def release(self) -> None:
        self.free = True

    def engage(self) -> None:
        self.free = False
        self.goal = self.q.copy()

    def stop(self) -> None:
        self.engage()

    def close(self) -> None:
        """Nothing is open."""
