"""Droop: how far gravity holds an arm below its target, where the robot does not compensate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.drivers.driver import Driver


@runtime_checkable
class Droops(Protocol):
    """A driver whose arm sags under gravity, or one around such a driver."""

    def droop(self, q: Floats) -> Floats:
        """Distance [n] (rad) of each joint below its target at `q` [n]: an arm that was sent to
        `q + droop(q)` is measured at `q`."""
        ...

    def unloaded(self, stretch: Floats) -> None:
        """Learn from an arm that rests and touches nothing, `stretch` [n] (rad) below its
        target."""
        ...


def droop_of(driver: Driver) -> Callable[[Floats], Floats]:
    """The driver's `droop`; zeros where gravity is compensated."""
    if isinstance(driver, Droops):
        return driver.droop
    return np.zeros_like


def unloaded(driver: Driver, stretch: Floats) -> None:
    """Tell a driver that knows no better that its unloaded arm is `stretch` [n] (rad) below its
    target."""
    if isinstance(driver, Droops):
        driver.unloaded(stretch)
