"""Safety stages that check whether a command may be followed at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from embodied.core.bounds import Bound, CountOrZero
from embodied.core.build import ConfigError
from embodied.real_robot.control.arm_state import ArmState, Limits
from embodied.real_robot.safety.chain import Tick


class Finite:
    """A command that is not a number is a fault, and so is a measurement."""

    name: ClassVar[str] = "finite"

    def begin(self, arm: ArmState) -> None:
        """Nothing is remembered."""

    def __call__(self, tick: Tick) -> None:
        arm = tick.arm
        # First of all: commands are made of measurements.
        if not (np.isfinite(arm.q).all() and np.isfinite(arm.dq).all()):
            tick.fault = tick.fault or "a measurement is not a finite number"
        if not np.isfinite(tick.q).all():
            np.copyto(tick.q, tick.last)
            tick.fault = tick.fault or "a command is not a finite number"


@dataclass(frozen=True)
class FreshConfig:
    """Ages and pauses (s) from which commands and measurements are not trusted."""

    hold: Annotated[float, Bound(above=0.0, high=60.0)]  # s: older commands are not followed
    stop: Annotated[float, Bound(above=0.0, high=120.0)]  # s: an older command is a fault
    state: Annotated[float, Bound(above=0.0, high=60.0)]  # s: an older measurement is a fault
    frozen: CountOrZero = 0  # ticks in which a measurement may repeat to the last bit; 0: any
    pause: Annotated[float, Bound(0.0, 60.0)] = 0.0  # s between ticks that is a fault; 0: none is

    def __post_init__(self) -> None:
        # Written so that NaN is refused, and infinity: it would switch the check off.
        if not 0 < self.hold <= self.stop < np.inf or not 0 < self.state < np.inf:
            raise ConfigError("safety.fresh needs 0 < hold <= stop and state above 0 (s), finite")
        if self.frozen < 0 or not 0 <= self.pause < np.inf:
            raise ConfigError("safety.fresh: frozen and pause should not be negative")


class Fresh:
    """Commands from old observations are not followed, and arms that are not seen do not move."""

    name: ClassVar[str] = "fresh"

    def __init__(self, config: FreshConfig) -> None:
        self.config = config
        self._forget()

    def begin(self, arm: ArmState) -> None:
        self._forget()

    def _forget(self) -> None:
        self.repeats, self.t, self.before = 0, -np.inf, b""
        self.now = np.inf

    def __call__(self, tick: Tick) -> None:
        # Each comparison is written so that a time that is not a number is too old.
        config, age = self.config, tick.now - tick.seen
        if not abs(tick.now - tick.arm.t) <= config.state:
            tick.fault = tick.fault or f"the arm was last seen {tick.now - tick.arm.t:.3f} s ago"
        if not tick.arm.t >= self.t:
            tick.fault = tick.fault or "a measurement is older than the one before"
        self.t = max(self.t, tick.arm.t)
        self._paused(tick)
        self._repeated(tick)
        if age < -config.state:  # stamped by another clock: it would never grow old
            tick.fault = tick.fault or f"the policy's observation is {-age:.3f} s from the future"
        if not age <= config.stop:
            tick.fault = tick.fault or f"the policy's last observation is {age:.3f} s old"
        tick.hold = tick.hold or not age <= config.hold

    def _paused(self, tick: Tick) -> None:
        gap, self.now = tick.now - self.now, tick.now
        if 0 < self.config.pause < gap:
            tick.fault = tick.fault or f"the control process paused for {gap:.3f} s"

    def _repeated(self, tick: Tick) -> None:
        if not self.config.frozen:
            return
        now = tick.arm.q.tobytes() + tick.arm.dq.tobytes()
        self.repeats = self.repeats + 1 if now == self.before else 0
        self.before = now
        if self.repeats >= self.config.frozen:
            tick.fault = tick.fault or f"the sensors have not changed in {self.repeats} ticks"


@dataclass(frozen=True)
class Heartbeat:
    """How long the daemon may be silent while the arm moves. A daemon beats every 0.05 s; with the
    defaults the arm is at rest 0.5 s after the last beat."""

    hold: Annotated[float, Bound(above=0.0, high=60.0)] = 0.25  # s: then the arm brakes and waits
    stop: Annotated[float, Bound(above=0.0, high=120.0)] = 2.0  # s: then the stop is latched

    def __post_init__(self) -> None:
        if not 0 < self.hold <= self.stop < float("inf"):
            raise ConfigError(
                f"heartbeat: hold={self.hold:g} and stop={self.stop:g} should be above 0 s, and "
                "hold at most stop"
            )


class Enabled:
    """An arm that is not enabled comes to rest, whatever is asked; that is no fault."""

    name: ClassVar[str] = "enabled"

    def __init__(self) -> None:
        self.on = False

    def begin(self, arm: ArmState) -> None:
        """Nothing is remembered."""

    def __call__(self, tick: Tick) -> None:
        tick.hold = tick.hold or not self.on


class Torque:
    """A measured torque above its limit, in `patience` ticks one after the other, is a fault."""

    name: ClassVar[str] = "torque"

    def __init__(self, limits: Limits, patience: int = 3) -> None:
        self.most, self.patience, self.above = np.asarray(limits.torque), patience, 0

    def begin(self, arm: ArmState) -> None:
        self.above = 0

    def __call__(self, tick: Tick) -> None:
        # Written so that a torque that is not a number counts as too large.
        fine = bool((np.abs(tick.arm.tau) <= self.most).all())
        self.above = 0 if fine else self.above + 1
        if self.above >= self.patience:
            joint = int(np.argmax(np.abs(np.nan_to_num(tick.arm.tau, nan=np.inf)) / self.most))
            tick.fault = tick.fault or (
                f"joint {joint} measures {tick.arm.tau[joint]:.1f} N m, its limit is "
                f"{self.most[joint]:.1f}"
            )


class TorqueRate:
    """Measured torques that changed faster than `most` [n] (N m/s, N/s) over the last `ticks` of
    `dt` s, a blow or a cable that catches, are a fault."""

    name: ClassVar[str] = "torque_rate"

    def __init__(self, most: tuple[float, ...], dt: float, ticks: int = 3) -> None:
        self.most = np.asarray(most, dtype=float)
        if not (np.isfinite(self.most) & (self.most > 0)).all():
            raise ConfigError("safety.torque_rate should be finite and above 0 for every joint")
        self.time, self.past, self.at = dt * ticks, np.zeros((ticks, len(most))), 0

    def begin(self, arm: ArmState) -> None:
        self.past[:] = arm.tau

    def __call__(self, tick: Tick) -> None:
        rate = np.abs(tick.arm.tau - self.past[self.at]) / self.time
        self.past[self.at] = tick.arm.tau
        self.at = (self.at + 1) % len(self.past)
        if not (rate <= self.most).all():  # also what is not a number
            joint = int(np.argmax(np.nan_to_num(rate, nan=np.inf) / self.most))
            tick.fault = tick.fault or (
                f"the torque of joint {joint} changed by {rate[joint]:.0f} N m/s, at most "
                f"{self.most[joint]:.0f} is allowed"
            )


class Tracking:
    """An arm that does not go where it is sent (blocked, unplugged, slipping) is a fault."""

    name: ClassVar[str] = "tracking"

    def __init__(self, limits: Limits) -> None:
        self.most = np.asarray(limits.tracking)

    def begin(self, arm: ArmState) -> None:
        """Nothing is remembered."""

    def __call__(self, tick: Tick) -> None:
        apart = np.abs(tick.arm.q - tick.last)
        if not (apart <= self.most).all():
            joint = int(np.argmax(apart - self.most))
            tick.fault = tick.fault or (
                f"joint {joint} is {apart[joint]:.3f} from where it was sent; at most "
                f"{self.most[joint]:.3f} is allowed"
            )
