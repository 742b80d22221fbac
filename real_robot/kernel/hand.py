"""Limits of a hand: its width, its speed and its force, and what it does at a stop.

    moving    the target goes to what is wanted, inside `low` and `high`, at most at `speed`
    at rest   the target becomes the measured width at once, so that a hand that was closing closes
              no further; one that is pushed open gives way. A hand that holds something keeps its
              target, and its force, until what it holds is gone.
    latched   as at rest (`hold`), or it opens (`open`), or it has no force at all (`limp`)

A sensor cannot tell a finger from an object: what was between the jaws for `SETTLED` s before the
stop is held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from embodied.core.bounds import Bound
from embodied.core.errors import ConfigError
from embodied.real_robot.kernel.driver import ArmDriver

REST_FORCE = 10.0  # N: largest force of a hand at rest that holds nothing
SETTLED = 0.5  # s for which a hand has stood still on something that it holds
STILL = 5e-4  # m that a hand may move and counts as still
SQUEEZE = 2e-3  # m by which the target of a hand that holds something is narrower than the hand
SLIP = 2e-3  # m by which it may close before what it held counts as gone
YIELD = 1e-3  # m by which a hand at rest is pushed open before its target follows


@dataclass(frozen=True)
class Config:
    """What a command may ask of the hand, and what the hand does at a latched stop."""

    high: Annotated[float, Bound(above=0.0, high=1.0)]  # largest opening, m
    speed: Annotated[float, Bound(above=0.0, high=10.0)]  # of opening and closing, m/s
    force: Annotated[float, Bound(above=0.0, high=1000.0)]  # largest force between the jaws, N
    at_stop: Literal["hold", "open", "limp"]  # what it does at a latched stop
    low: Annotated[float, Bound(0.0, 1.0)] = 0.0  # smallest opening, m

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ConfigError(f"hand: low={self.low:g} should be below high={self.high:g} (m)")


class Grasp:
    """Whether a hand holds something: call `see` with every measurement."""

    def __init__(self) -> None:
        self.held = False
        self.width = math.inf
        """Opening (m) at which it came to stand still."""
        self._since = 0.0

    def see(self, measured: float, target: float, now: float) -> None:
        """Note the opening `measured` (m) of a hand that was sent to `target` (m), at `now` (s)."""
        squeezes = measured - target > SQUEEZE
        if self.held:
            self.held = squeezes and measured > self.width - SLIP
        elif squeezes and abs(measured - self.width) <= STILL:
            self.held = now - self._since >= SETTLED
        else:
            self.width = measured
            self._since = now


class HandLimiter:
    """Call `move` or `stay` once a tick of `dt` s for the opening to send, then `tell`."""

    def __init__(self, config: Config, dt: float) -> None:
        self.config = config
        self.dt = dt
        self.grasp = Grasp()
        self.width = config.low
        """Opening (m) that was sent last."""
        self.force = config.force
        """Force (N) that the hand may press with now."""
        self._told: float | None = None
        self._measured = config.low
        self._ticks = 0
        self._stays = False

    def begin(self, measured: float) -> float:
        """Begin at rest with a hand that is measured to be open by `measured` (m); returns its
        target (m)."""
        self._see(measured)
        self._stays = False
        if not self.grasp.held:
            self.width = self._measured
        return self.width

    def forget(self) -> None:
        """Tell the driver its limits again, because it was connected anew."""
        self._told = None

    def move(self, wanted: float, measured: float) -> float:
        """Opening (m) to send to a hand that is wanted to be open by `wanted` (m, finite)."""
        self._see(measured)
        self._stays = False
        self.force = self.config.force
        return self._towards(wanted)

    def stay(self, measured: float, latched: bool) -> float:
        """Opening (m) to send to a hand that comes to rest; `latched`: by a latched stop."""
        config = self.config
        held_before = self.grasp.held
        self._see(measured)
        held = self.grasp.held
        if latched and config.at_stop == "open":
            self.force = config.force
            return self._towards(config.high)
        limp = latched and config.at_stop == "limp"
        gives_way = not self._stays or self._measured > self.width + YIELD
        if limp or (gives_way and not held and not held_before):
            self.width = self._measured
        elif held_before and not held:  # it is gone; the hand opens again to where it was
            self.width = max(self._measured, self.grasp.width)
        self._stays = True
        self.force = 0.0 if limp else config.force if held else min(config.force, REST_FORCE)
        return self.width

    def tell(self, driver: ArmDriver) -> None:
        """Limit the driver's hand, where its limits have changed. DriverError, once."""
        if self.force != self._told:
            self._told = self.force
            driver.limit_hand(self.config.speed, self.force)

    def _see(self, measured: float) -> None:
        """Note a measurement; one that is not finite is ignored."""
        self._ticks += 1
        if math.isfinite(measured):
            self._measured = measured
            self.grasp.see(measured, self.width, self._ticks * self.dt)

    def _towards(self, wanted: float) -> float:
        step = self.config.speed * self.dt
        aim = min(max(wanted, self.config.low), self.config.high)
        self.width += min(max(aim - self.width, -step), step)
        return self.width
