"""Emulated Crazyflie firmware: supervisor, commander, planner, watchdogs.

    not ready -> ready -> armed -> flying <-> level (0.5 s without a set-point)
                                   flying, level -> locked (2 s without, emergency stop, tumbled)

Times and transitions are those of the firmware's supervisor (2025). Locked means motors off until
it is switched off and on. The physics are behind `Body`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, Protocol

from embodied.core.bounds import Bound
from embodied.real_robot.emulators.crazyflie.crtp import OFF, STOP, ZERO, Order, Setpoint, Vector

LEVEL_AFTER, LOCK_AFTER = 0.5, 2.0  # s without a set-point
WATCHDOG = 1.0  # s without its packet, once there was one
STILL = 2.0  # s of idle motors until it counts as landed
TUMBLED = 1.0  # s
NONE, ONBOARD, RADIO = 0, 1, 2  # who may command


class State(IntEnum):
    """Of the supervisor."""

    NOT_READY = 0
    READY = 1
    ARMED = 2
    FLYING = 3
    LEVEL = 4
    LOCKED = 5
    CRASHED = 6


@dataclass(slots=True)
class Measured:
    """What the drone believes of itself: `place` (m), `velocity` (m/s), `angles` (roll, pitch, yaw;
    rad), `rates` (rad/s, its own axes), `variance` of its place (m^2), `motors` in [0, 1]."""

    place: Vector = ZERO
    velocity: Vector = ZERO
    angles: Vector = ZERO
    rates: Vector = ZERO
    variance: float = 0.0
    motors: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


class Body(Protocol):
    """A drone that flies."""

    def measure(self) -> Measured: ...

    def fly(self, setpoint: Setpoint, dt: float) -> None:
        """Follow for `dt` s."""
        ...

    def hint(self, place: Vector) -> None:
        """An outside tracker says where it is (m)."""
        ...

    def choose(self, learned: bool) -> None:
        """A policy on board flies, or its own controller does."""
        ...

    def upright(self) -> bool:
        """Whether it is not lying on its side."""
        ...


@dataclass(frozen=True)
class Config:
    """Settings of the emulated firmware."""

    arms_itself: bool = False  # whether no arming is needed (brushed motors)
    battery: Annotated[float, Bound(0.0, 20.0)] = 4.0  # V at the start
    drain: Annotated[float, Bound(0.0, 20.0)] = 0.0  # V/s by which the battery falls


class Firmware:
    """`tick(now)` at 100 Hz; what comes over the radio calls the other methods."""

    def __init__(self, config: Config, body: Body, now: float) -> None:
        self.config, self.body, self.began, self.now = config, body, now, now
        self.state, self.armed, self.crashed = State.NOT_READY, False, False
        self.fit = True
        """Whether it passes its checks before a flight."""
        self.setpoint, self.stamp, self.owner = OFF, now, NONE
        self.order: Order | None = STOP
        """What the planner does; None where a set-point by radio has put it out of action."""
        self.stopping, self.fed = False, -1.0
        self.thrust_at, self.upright_at = -1e9, now
        self.measured = body.measure()
        self.start = self.measured
        self.voltage = config.battery

    def tick(self, now: float) -> None:
        """The time since the last tick goes by."""
        dt, self.now = now - self.now, now
        self.measured = self.body.measure()
        self.voltage = self.config.battery - self.config.drain * (now - self.began)
        self._plan()
        self._supervise()
        wanted = self.setpoint if self.can_fly else OFF
        if self.state == State.LEVEL:
            wanted = replace(wanted, across="tilt", tilt=(0.0, 0.0), turn="rate", yaw=0.0)
        if max(self.measured.motors) > 0.1 and wanted != OFF:
            self.thrust_at = now
        self.body.fly(wanted, dt)

    def follow(self, setpoint: Setpoint) -> None:
        """A set-point by radio: the planner is out of action from here on."""
        self._take(setpoint, RADIO)
        self.order = None

    def relax(self) -> None:
        """The next commander may be any."""
        self.owner = NONE

    def obey(self, order: Order) -> None:
        """To the planner on board, from where it is now."""
        self.start, self.order = self.measured, order
        self.ordered = self.now

    def arm(self, wanted: bool) -> bool:
        """Whether that could be done."""
        if wanted and not self.armed and self.state != State.READY:
            return False
        self.armed = wanted
        return True

    def recover(self) -> bool:
        """From a crash, where it stands upright again."""
        if self.crashed and self.body.upright():
            self.crashed = False
        return not self.crashed

    def feed(self) -> None:
        """The emergency watchdog's packet: from the first on it is wanted every second."""
        self.fed = self.now

    @property
    def can_fly(self) -> bool:
        """Whether motors may run."""
        return self.state in (State.ARMED, State.FLYING, State.LEVEL)

    @property
    def flying(self) -> bool:
        return self.state in (State.FLYING, State.LEVEL)

    @property
    def planning(self) -> bool:
        """Whether the planner on board flies it."""
        return self.order is not None and self.order is not STOP

    @property
    def info(self) -> int:
        """The supervisor's bits."""
        bits = (
            self.state == State.READY,
            self.armed,
            self.config.arms_itself,
            self.can_fly,
            self.flying,
            self._tumbled(),
            self.state == State.LOCKED,
            self.crashed,
            self.planning,
            self.planning and self.now >= self.ordered + self._order.seconds,
            self.order is None,
        )
        return sum(bit << i for i, bit in enumerate(bits))

    @property
    def _order(self) -> Order:
        assert self.order is not None
        return self.order

    def _take(self, setpoint: Setpoint, owner: int) -> None:
        if owner >= self.owner:
            self.setpoint, self.stamp, self.owner = setpoint, self.now, owner

    def _plan(self) -> None:
        """The planner's set-point, of a polynomial of seventh degree that begins and ends at
        rest."""
        if self.order is None:
            return
        if self.order is STOP:
            self._take(OFF, ONBOARD)
            return
        s = min(1.0, (self.now - self.ordered) / self.order.seconds)
        if s >= 1 and self.order.lands:
            self.order = STOP
            return
        share = s**4 * (35 - 84 * s + 70 * s * s - 20 * s**3)
        rate = 140 * s**3 * (1 - s) ** 3 / self.order.seconds
        (a, b, c), (x, y, z) = self.start.place, self._way()
        place, velocity = (
            (a + share * x, b + share * y, c + share * z),
            (rate * x, rate * y, rate * z),
        )
        yaw = self.start.angles[2] if self.order.yaw is None else self.order.yaw
        self._take(Setpoint("place", "place", "angle", place, velocity, yaw=yaw), ONBOARD)

    def _way(self) -> Vector:
        """From where it began to where it goes."""
        order, (a, b, c) = self._order, self.start.place
        x, y, z = order.place
        if order.vertical:
            return (0.0, 0.0, z - c)
        return order.place if order.relative else (x - a, y - b, z - c)

    def _tumbled(self) -> bool:
        return self.now - self.upright_at > TUMBLED

    def _passes(self) -> bool:
        return self.fit and not (self._tumbled() or self.crashed)

    def _supervise(self) -> None:
        if self.body.upright():
            self.upright_at = self.now
        age, busy = self.now - self.stamp, self.now - self.thrust_at < STILL
        starved = self.fed >= 0 and self.now - self.fed > WATCHDOG
        lost = self.flying and (age > LOCK_AFTER or self._tumbled() or not self.armed)
        if self.stopping or starved or lost:
            self._enter(State.LOCKED)
        elif self.flying and not busy:
            self._enter(State.NOT_READY)
        elif self.flying:
            self.state = State.LEVEL if age > LEVEL_AFTER else State.FLYING
        elif self.state == State.NOT_READY and self._passes():
            self._enter(State.READY)
        elif self.state == State.READY and not self._passes():
            self._enter(State.NOT_READY)
        elif self.state == State.READY and self.armed:
            self.state = State.ARMED
        elif self.state == State.ARMED and not self.armed:
            self._enter(State.NOT_READY)
        elif self.state == State.ARMED and busy:
            self.state = State.FLYING

    def _enter(self, state: State) -> None:
        if self.state == State.LOCKED:
            return  # for good
        self.state = state
        self.armed = state == State.READY and self.config.arms_itself
