"""Springs: how a driver holds an arm between two set-points, as the safety chain knows it.

torque = K (q_d - q) - D dq            joints:  [n] N m/rad, N m s/rad
force  = K (x_d - x) - D v             tool:    x, y, z (N/m, N s/m), then the turn about them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from embodied.core.bounds import Bound
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.driver import ArmDriver, DriverError, HasSprings, Springs

Gain = Annotated[float, Bound(above=0.0, high=3000.0)]


@dataclass(frozen=True)
class Tool:
    """Springs on the tool's pose, critically damped."""

    stiffness: Gain = 500.0  # of the tool's place, N/m
    turning: Gain = 30.0  # of the tool's turn, N m/rad
    force: Gain = 30.0  # largest pull on the place, N
    torque: Gain = 5.0  # largest pull on the turn, N m
    elbow: Gain = 10.0  # of the motion that leaves the tool where it is, N m/rad


def stiffness_of(driver: ArmDriver) -> tuple[Floats, Floats] | None:
    """Lowest and highest stiffness [m] of the driver's springs; None where it has none."""
    return driver.stiffness if isinstance(driver, HasSprings) else None


def check_stiffness(stiffness: Floats, span: tuple[Floats, Floats] | None, name: str) -> None:
    """DriverError where driver `name` cannot hold an arm with `stiffness` [m]."""
    if span is None:
        raise DriverError(f"{name} cannot change its stiffness")
    low, high = span
    if np.shape(stiffness) != low.shape or not ((stiffness >= low) & (stiffness <= high)).all():
        raise DriverError(
            f"{name} was asked for a stiffness of {np.round(stiffness, 2).tolist()}; it takes "
            f"{low.tolist()} to {high.tolist()}"
        )


def tool_springs(tool: Tool) -> Springs:
    """The springs of a tool's settings. Damping is critical for a mass of 1 kg (1 kg m^2)."""
    stiffness = np.repeat([tool.stiffness, tool.turning], 3)
    stretch = np.repeat([tool.force / tool.stiffness, tool.torque / tool.turning], 3)
    return Springs("tool", stiffness, 2 * np.sqrt(stiffness), stretch)


SOFTEST = 0.1
"""Lowest stiffness, as a share of the settings."""


def span(springs: Springs) -> tuple[Floats, Floats]:
    """Lowest and highest stiffness [m] of springs while they hold an arm. The settings are the
    highest, because the bound of the pull was chosen for them."""
    return SOFTEST * springs.stiffness, springs.stiffness


def damped(springs: Springs, stiffness: Floats) -> Floats:
    """The damping [m] that goes with another stiffness [m]: the damping ratio stays."""
    return springs.damping * np.sqrt(stiffness / springs.stiffness)
