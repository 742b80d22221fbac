"""Springs: how a driver holds an arm between two set-points, as the safety chain knows it.

torque = K (q_d - q) - D dq            joints:  [n] N m/rad, N m s/rad
force  = K (x_d - x) - D v             tool:    x, y, z (N/m, N s/m), then the turn about them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.control.arm_state import Floats

Frame = Literal["joints", "tool"]
Gain = Annotated[float, Bound(above=0.0, high=3000.0)]


@dataclass(frozen=True)
class Tool:
    """Springs on the tool's pose, critically damped."""

    stiffness: Gain = 500.0  # of the tool's place, N/m
    turning: Gain = 30.0  # of the tool's turn, N m/rad
    force: Gain = 30.0  # largest pull on the place, N
    torque: Gain = 5.0  # largest pull on the turn, N m
    elbow: Gain = 10.0  # of the motion that leaves the tool where it is, N m/rad

    def __post_init__(self) -> None:
        values = (self.stiffness, self.turning, self.force, self.torque, self.elbow)
        if not all(0 < value <= 3000 for value in values):
            raise ConfigError("tool: stiffness, turning, force, torque, elbow above 0, up to 3000")


@dataclass(frozen=True)
class Springs:
    """On the joints [n] or on the tool [6]; `stretch`: how far (rad, m) each is stretched before
    its pull grows no more."""

    frame: Frame
    stiffness: Floats
    damping: Floats
    stretch: Floats


def tool_springs(tool: Tool) -> Springs:
    """Of a tool's settings; damping is critical for a mass of 1 kg (an inertia of 1 kg m^2)."""
    stiffness = np.repeat([tool.stiffness, tool.turning], 3)
    stretch = np.repeat([tool.force / tool.stiffness, tool.torque / tool.turning], 3)
    return Springs("tool", stiffness, 2 * np.sqrt(stiffness), stretch)


SOFTEST = 0.1


def span(springs: Springs) -> tuple[Floats, Floats]:
    """The stiffness [m] that such springs may be given while they hold an arm: those of the
    settings are the highest, as the bound of their pull was chosen for them."""
    return SOFTEST * springs.stiffness, springs.stiffness


def damped(springs: Springs, stiffness: Floats) -> Floats:
    """The damping [m] that goes with another stiffness [m]: the damping ratio stays."""
    return springs.damping * np.sqrt(stiffness / springs.stiffness)
