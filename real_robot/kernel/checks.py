"""Safety stages that check whether a command may be followed at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from embodied.core.bounds import Bound, CountOrZero
from embodied.core.errors import ConfigError
from embodied.real_robot.kernel.arm_state import ArmState, Limits
from embodied.real_robot.kernel.chain import Tick


class Finite:
    """A command or a measurement that is not a finite number is a fault."""

    name: ClassVar[str] = "finite"

    def begin(self, arm: ArmState) -> None:
        """Nothing is remembered."""

    def __call__(self, tick: Tick) -> None:
        arm = tick.arm
        # Measurements come first, because commands are made of them.
        if not (np.isfinite(arm.q).all() and np.isfinite(arm.dq).all()):
            tick.fail("a measurement is not a finite number")
        if not np.isfinite(tick.q).all():
            np.copyto(tick.q, tick.last)
            tick.fail("a command is not a finite number")


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
    """A command from an old observation is not followed; an arm that is not measured is a fault."""

    name: ClassVar[str] = "fresh"

    def __init__(self, config: FreshConfig) -> None:
        self.config = config
        self._forget()

    def begin(self, arm: ArmState) -> None:
        self._forget()

    def _forget(self) -> None:
        self.repeats = 0
        """Ticks in which the newest measurement repeated itself."""
        self.newest_time = -np.inf
        """Time (s) of the newest measurement."""
        self.last_reading = b""
        """Bytes of the newest measured positions and velocities."""
        self.last_tick = np.inf
        """Time (s) of the tick before."""

    def __call__(self, tick: Tick) -> None:
        # Each comparison is written so that a time that is not a number is too old.
        config = self.config
        if not abs(tick.now - tick.arm.t) <= config.state:
            tick.fail(f"the arm was last seen {tick.now - tick.arm.t:.3f} s ago")
        if not tick.arm.t >= self.newest_time:
            tick.fail("a measurement is older than the one before")
        self.newest_time = max(self.newest_time, tick.arm.t)
        self._check_pause(tick)
        self._check_repeats(tick)
        age = tick.now - tick.seen
        if age < -config.state:  # stamped by another clock: it would never grow old
            tick.fail(f"the policy's observation is {-age:.3f} s from the future")
        if not age <= config.stop:
            tick.fail(f"the policy's last observation is {age:.3f} s old")
        tick.hold = tick.hold or not age <= config.hold

    def _check_pause(self, tick: Tick) -> None:
        gap = tick.now - self.last_tick
        self.last_tick = tick.now
        if 0 < self.config.pause < gap:
            tick.fail(f"the control process paused for {gap:.3f} s")

    def _check_repeats(self, tick: Tick) -> None:
        if not self.config.frozen:
            return
        reading = tick.arm.q.tobytes() + tick.arm.dq.tobytes()
        self.repeats = self.repeats + 1 if reading == self.last_reading else 0
        self.last_reading = reading
        if self.repeats >= self.config.frozen:
            tick.fail(f"the sensors have not changed in {self.repeats} ticks")


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
    """An arm that is not enabled comes to rest, whatever is commanded. That is no fault."""

    name: ClassVar[str] = "enabled"

    def __init__(self) -> None:
        self.on = False

    def begin(self, arm: ArmState) -> None:
        """Nothing is remembered."""

    def __call__(self, tick: Tick) -> None:
        tick.hold = tick.hold or not self.on


class Torque:
    """A measured torque above its limit in `patience` consecutive ticks is a fault."""

    name: ClassVar[str] = "torque"

    def __init__(self, limits: Limits, patience: int = 3) -> None:
        self.most = np.asarray(limits.torque)
        """Largest torque [n], N m (N)."""
        self.patience = patience
        self.ticks_above = 0
        """Consecutive ticks with a torque above its limit, up to now."""

    def begin(self, arm: ArmState) -> None:
        self.ticks_above = 0

    def __call__(self, tick: Tick) -> None:
        # Written so that a torque that is not a number counts as too large.
        within = bool((np.abs(tick.arm.tau) <= self.most).all())
        self.ticks_above = 0 if within else self.ticks_above + 1
        if self.ticks_above >= self.patience:
            joint = int(np.argmax(np.abs(np.nan_to_num(tick.arm.tau, nan=np.inf)) / self.most))
            tick.fail(
                f"joint {joint} measures {tick.arm.tau[joint]:.1f} N m, its limit is "
                f"{self.most[joint]:.1f}"
            )


class TorqueRate:
    """A torque that changed faster than `most` [n] (N m/s, N/s) over the last `ticks` ticks of
    `dt` s is a fault: a blow, or a cable that catches."""

    name: ClassVar[str] = "torque_rate"

    def __init__(self, most: tuple[float, ...], dt: float, ticks: int = 3) -> None:
        self.most = np.asarray(most, dtype=float)
        if not (np.isfinite(self.most) & (self.most > 0)).all():
            raise ConfigError("safety.torque_rate should be finite and above 0 for every joint")
        self.span = dt * ticks
        """Time (s) from the oldest kept torque to the newest."""
        self.past = np.zeros((ticks, len(most)))
        """The last torques [ticks, n], a ring."""
        self.oldest = 0
        """Row of the oldest torque in the ring."""

    def begin(self, arm: ArmState) -> None:
        self.past[:] = arm.tau

    def __call__(self, tick: Tick) -> None:
        rate = np.abs(tick.arm.tau - self.past[self.oldest]) / self.span
        self.past[self.oldest] = tick.arm.tau
        self.oldest = (self.oldest + 1) % len(self.past)
        if not (rate <= self.most).all():  # also what is not a number
            joint = int(np.argmax(np.nan_to_num(rate, nan=np.inf) / self.most))
            tick.fail(
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
        error = np.abs(tick.arm.q - tick.last)
        if not (error <= self.most).all():
            joint = int(np.argmax(error - self.most))
            tick.fail(
                f"joint {joint} is {error[joint]:.3f} from where it was sent; at most "
                f"{self.most[joint]:.3f} is allowed"
            )


LET_GO = 0.25  # s without a beat of the operator's hand


class Silence:
    """How long a sender of beats has been silent, by the listener's clock: a beat is a new
    `count`. What the sender says of its own clock only makes a beat older, never newer."""

    def __init__(self) -> None:
        self.count = 0
        self.heard = -np.inf
        """Time (s, the listener's clock) of the newest beat."""

    def hear(self, count: int, sent: float, now: float) -> None:
        """Note the newest message, which says that it was sent at `sent` (s). One whose time is not
        finite counts as never sent."""
        if count != self.count:
            self.count = count
            self.heard = min(sent, now) if np.isfinite(sent) else -np.inf

    def __call__(self, now: float) -> float:
        """Time (s) since the newest beat; infinite where none was ever heard."""
        return now - self.heard


class DaemonAlive:
    """While the stage is `watched` and the daemon is silent, the arm comes to rest and waits; a
    daemon that stays silent is a fault. Without the daemon no operator can stop the arm."""

    name: ClassVar[str] = "heartbeat"

    def __init__(self, config: Heartbeat) -> None:
        self.config = config
        self.silence = Silence()
        self.watched = False

    def begin(self, arm: ArmState) -> None:
        """The newest beat is still the newest."""

    def speaks(self, now: float) -> bool:
        """Whether the newest beat is young enough at `now` (s)."""
        return self.silence(now) <= self.config.hold  # false also where it is no number

    def __call__(self, tick: Tick) -> None:
        if not self.watched:
            return
        silence = self.silence(tick.now)
        tick.hold = tick.hold or not silence <= self.config.hold
        if not silence <= self.config.stop:
            tick.fail(f"the daemon has not answered for {silence:.1f} s")


class HoldToRun:
    """While no operator holds a key, button or pedal, the arm comes to rest, in every mode. That is
    no fault."""

    name: ClassVar[str] = "hold_to_run"

    def __init__(self) -> None:
        self.silence = Silence()

    def begin(self, arm: ArmState) -> None:
        """The newest beat is still the newest."""

    def held(self, now: float) -> bool:
        """Whether the newest beat is young enough at `now` (s)."""
        return self.silence(now) <= LET_GO  # false also where it is no number

    def __call__(self, tick: Tick) -> None:
        tick.hold = tick.hold or not self.held(tick.now)
