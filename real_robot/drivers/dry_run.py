"""Dry run: holds the real arm where it stands and simulates an arm that follows at once."""

from __future__ import annotations

import numpy as np

from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.springs import check_stiffness, stiffness_of
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.driver import DriverError, Springs, StopCategory, springs_of


class DryRunDriver(Driver):
    """The wire, its stamps and its faults are those of `driver`; the joints are where they were
    sent, as of an arm that follows at once."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.joints = driver.joints
        self.sensed = driver.sensed
        self.grip = driver.grip
        self._q: Floats = np.zeros(len(driver.joints))
        self._dq, self._held = self._q.copy(), self._q.copy()
        self._t = self._then = 0.0
        self._width = self._wide = 0.0

    def connect(self) -> None:
        self.driver.connect()
        arm = self.driver.read()
        self._q = arm.q.copy()
        self._held = arm.q.copy()
        self._t = arm.t
        self._then = arm.t
        self._width = self._wide = self.driver.width

    def read(self) -> ArmState:
        arm = self.driver.read()
        self._t = arm.t
        return ArmState(self._q.copy(), self._dq.copy(), arm.tau, arm.t, arm.force, arm.external)

    def write(self, q: Floats, width: float) -> None:
        self.driver.write(self._held, self._wide)
        if self._t > self._then:
            self._dq = (q - self._q) / (self._t - self._then)
            self._then = self._t
        self._q = q.copy()
        self._width = width

    @property
    def width(self) -> float:
        return self._width

    @property
    def springs(self) -> Springs | None:
        return springs_of(self.driver)

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        return stiffness_of(self.driver)

    def stiffen(self, stiffness: Floats) -> None:
        """Check `stiffness` [m]; the arm that is held keeps its own."""
        check_stiffness(stiffness, self.stiffness, type(self.driver).__name__)

    def sense(self) -> Floats:
        return self.driver.sense()

    def check(self, limits: Limits) -> None:
        self.driver.check(limits)

    def recover(self) -> None:
        self.driver.recover()

    def release(self) -> None:
        raise DriverError("a dry run holds the arm: release it without dry=true")

    def limit_hand(self, speed: float, force: float) -> None:
        self.driver.limit_hand(speed, force)

    def cut(self) -> None:
        self.driver.cut()

    def halt(self) -> StopCategory:
        return self.driver.halt()

    def stop(self) -> None:
        self.driver.stop()

    def close(self) -> None:
        self.driver.close()
