"""Measured joint state and joint limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Bound
from embodied.core.errors import ConfigError

Floats = NDArray[np.float64]
SHORTEST = 1e-7  # s of a motion between limits
LONGEST = 1000.0  # s of a motion between limits

Place = Annotated[float, Bound(-1e3, 1e3)]
"""A position in rad or m."""


@dataclass(slots=True)
class ArmState:
    """A measurement of the arm."""

    q: Floats
    """Joint positions [n], rad (m for sliding joints)."""
    dq: Floats
    """Joint velocities [n], rad/s (m/s)."""
    tau: Floats
    """Joint torques [n], N m (N); zero where they are not measured."""
    t: float
    """Time (s) at which this was true, on the control process's monotonic clock."""
    force: Floats | None = None
    """The robot's own estimate of the external force on its tool [3], N; None: it has none."""
    external: Floats | None = None
    """Estimated external torques of the joints [n], N m (N); None: there is no estimate."""


@dataclass(frozen=True)
class Limits:
    """What a command may ask of n joints. Nothing has a default: what is not set is not known to be
    safe, and does not start."""

    low: tuple[Place, ...]  # lowest position of each joint [n], rad (m)
    high: tuple[Place, ...]  # highest position of each joint [n], rad (m)
    margin: tuple[Annotated[float, Bound(0.0, 1e3)], ...]  # kept free at both ends [n], rad (m)
    velocity: tuple[Annotated[float, Bound(above=0.0, high=1e3)], ...]  # both ways [n], rad/s (m/s)
    acceleration: tuple[Annotated[float, Bound(above=0.0, high=1e5)], ...]  # [n], rad/s^2 (m/s^2)
    jerk: tuple[Annotated[float, Bound(above=0.0, high=1e7)], ...]  # [n], rad/s^3 (m/s^3)
    torque: tuple[Annotated[float, Bound(above=0.0, high=1e5)], ...]  # largest measured, N m (N)
    tracking: tuple[Annotated[float, Bound(above=0.0, high=1e3)], ...]  # largest error [n], rad (m)

    def __post_init__(self) -> None:
        n = len(self.low)
        for field in fields(self):
            value = np.asarray(getattr(self, field.name), dtype=float)
            if len(value) != n or not np.isfinite(value).all():
                raise ConfigError(f"limits.{field.name} should be {n} finite numbers, one a joint")
            if field.name not in ("low", "high", "margin") and not (value > 0).all():
                raise ConfigError(f"limits.{field.name} should be above 0 for every joint")
        low, high, margin = (np.asarray(v) for v in (self.low, self.high, self.margin))
        if not ((margin >= 0) & (low + margin < high - margin)).all():
            raise ConfigError("limits: low + margin should be below high - margin for every joint")
        self._check_times(high - low)

    def _check_times(self, way: Floats) -> None:
        """Motions between the limits have to be plannable: neither for hours, nor in no time."""
        v, a, j = (np.asarray(x) for x in (self.velocity, self.acceleration, self.jerk))
        with np.errstate(over="ignore"):
            times = np.array([way / v, v / a, a / j])
        if not ((times >= SHORTEST) & (times <= LONGEST)).all():
            raise ConfigError(
                "limits: range / velocity, velocity / acceleration and acceleration / jerk should "
                f"be from {SHORTEST:g} to {LONGEST:g} s for every joint"
            )

    def __len__(self) -> int:
        return len(self.low)
