"""Dry run: holds the real arm where it stands and simulates an arm that follows at once."""

from __future__ import annotations

import numpy as np

from embodied.real_robot.drivers.driver import Driver, DriverAround
from embodied.real_robot.drivers.springs import check_stiffness
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import DriverError


class DryRunDriver(DriverAround):
    """The wire, its stamps and its faults are those of `driver`; the joints are where they were
    sent, as of an arm that follows at once."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._q: Floats = np.zeros(len(driver.joints))
        self._dq = self._q.copy()
        self._held = self._q.copy()
        self._t = 0.0
        self._sent = 0.0
        self._width = 0.0
        self._held_width = 0.0

    def connect(self) -> None:
        self.driver.connect()
        arm = self.driver.read()
        self._q = arm.q.copy()
        self._held = arm.q.copy()
        self._t = arm.t
        self._sent = arm.t
        self._held_width = self.driver.width
        self._width = self._held_width

    def read(self) -> ArmState:
        arm = self.driver.read()
        self._t = arm.t
        return ArmState(self._q.copy(), self._dq.copy(), arm.tau, arm.t, arm.force, arm.external)

    def write(self, q: Floats, width: float) -> None:
        self.driver.write(self._held, self._held_width)
        if self._t > self._sent:
            self._dq = (q - self._q) / (self._t - self._sent)
            self._sent = self._t
        self._q = q.copy()
        self._width = width

    @property
    def width(self) -> float:
        return self._width

    def stiffen(self, stiffness: Floats) -> None:
        """Check `stiffness` [m]; the arm that is held keeps its own."""
        check_stiffness(stiffness, self.stiffness, type(self.driver).__name__)

    def release(self) -> None:
        raise DriverError("a dry run holds the arm: release it without dry=true")
