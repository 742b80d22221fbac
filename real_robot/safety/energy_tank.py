"""Energy tank: a bounded budget for the energy that a moving set-point puts into an arm.

Variable impedance with an energy tank (Ferraguti et al., 2013; Zanella et al., 2024). Springs of
constant stiffness around a resting set-point are passive. What a moving set-point or a changing
stiffness adds is drawn from a tank, which damping refills; a change that the tank cannot afford is
made smaller.

    U(s, K, x) = 1/2 (s - x)' K (s - x)     stored by the springs; linear beyond their stretch
    change from (s, K) to (s', K') at x costs  U(s', K', x) - U(s, K, x)
    damping over a time T refills at least     D (x(T) - x(0))^2 / T      (Cauchy-Schwarz)

The books use measured positions only, so the noise of measured velocities is of no effect. What is
not certain is booked to the tank's disadvantage: a measurement may be `delay` s old, so that a
change costs the most that it can have cost in that time, and positions may be off by `noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Bound, Fraction
from embodied.core.build import ConfigError
from embodied.real_robot.control.arm_state import Floats

SURE = 2.0  # standard deviations by which a measured position may be off, at every change
MOVED = 5.0  # standard deviations of a displacement that are no motion
LEAST_WINDOW = 0.05  # s over which displacements are taken as dissipated
ROUNDING = 1e-12  # J
SHARES = np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0])
"""Of a wanted change, the largest first: what is tried."""
ROWS = (
    "_level", "_opened", "_from", "x", "setpoint", "stiffness",
    "_softest", "_stiffest", "_softer", "_stiffer",
)  # fmt: skip
CHANGES = ("_old", "_new", "_soft", "_hard", "_worst", "_guess")
Error = Callable[[Floats, Floats], Floats]
"""How far springs whose rest is at `s` [..., p] are stretched at `x` [..., p]: [..., m]."""

Energy = Annotated[float, Bound(above=0.0, high=1e6)]
"""J."""


@dataclass(frozen=True, kw_only=True)
class TankConfig:
    """The books of an energy tank."""

    start: Energy  # J in the tank at the start
    most: Energy  # J that the tank holds at most
    least: Energy  # J that always stay in the tank
    power: Annotated[float, Bound(above=0.0, high=1e6)]  # W that the tank gives at most
    share: Fraction = 1.0  # share of what damping dissipates that goes back into the tank
    noise: Fraction = 0.0  # standard deviation of a measured position, rad (m)
    delay: Fraction = 0.0  # most time from a set-point to the measurement of its effect, s
    speed: Annotated[float, Bound(0.0, 1e4)] = 0.0  # fastest motion in that time, rad/s (m/s)
    late: Fraction = 0.0  # age of the position that the springs know, s; 0: the robot's own

    def __post_init__(self) -> None:
        # Written so that NaN is refused.
        inside = 0 < self.least <= self.start <= self.most < np.inf
        if not inside or not 0 < self.power < np.inf:
            raise ConfigError("safety.energy needs 0 < least <= start <= most and power above 0")
        if not 0 <= self.share <= 1:
            raise ConfigError("safety.energy: share should be between 0 and 1")
        if not all(0 <= each <= 1 for each in (self.noise, self.delay, self.late)):
            raise ConfigError("safety.energy: noise, delay, late: 0 to 1 (rad or m; s; s)")
        if not 0 <= self.speed < np.inf or (self.delay and not self.speed):
            raise ConfigError(
                "safety.energy: with a delay, speed (the fastest that the arm moves, rad/s or m/s) "
                "should be above 0"
            )


@dataclass(frozen=True)
class Held:
    """Springs and dampers [m] that an arm is held with, as set up; `stretch` [m] (rad, m): beyond
    it a spring's pull grows no more. With less stiffness the damping falls by its square root."""

    stiffness: Floats
    damping: Floats
    stretch: Floats

    def check(self, late: float) -> None:
        """ConfigError where springs that know the position `late` s late give energy away."""
        wanting = self.damping < self.stiffness * late
        if wanting.any():
            raise ConfigError(
                f"safety.energy: springs of {self.stiffness.tolist()} that are {late:g} s late "
                f"need a damping of {(self.stiffness * late).tolist()} or more to be passive"
            )

    def stored(self, e: Floats) -> Floats:
        """[..., m] J in each spring of 1 N/m that is stretched by `e` [..., m]."""
        far = np.abs(e)
        short = np.minimum(far, self.stretch)
        return short * (far - 0.5 * short)

    def cost(self, old: Floats, new: Floats, soft: Floats, hard: Floats, far: float) -> Floats:
        """[...] J, the most that it takes to change springs of `soft` stretched by `old` [..., m]
        into `hard` ones stretched by `new`, if every stretch may be off by `far`."""
        shape = np.where(hard > soft, np.abs(old) + far, np.maximum(np.abs(old) - far, 0.0))
        # First the stiffness where the set-point was, then the set-point.
        cost = (hard - soft) * self.stored(shape)
        cost += hard * (self.stored(new) - self.stored(old) + far * np.abs(new - old))
        return cost.sum(-1)

    def refilled(self, moved: Floats, softest: Floats, stiffest: Floats, late: float) -> Floats:
        """[...] J s: what dampers take at least, times the time, while x moves by `moved`."""
        damping = self.damping * np.sqrt(softest / self.stiffness) - late * stiffest
        return (np.maximum(damping, 0.0) * moved * moved).sum(-1)


def straight(s: Floats, x: Floats) -> Floats:
    """The `Error` of springs along axes."""
    return s - x


class Tank:
    """The books of one arm, or of a batch of arms [...]. `level` [...] is what is certain to be
    in the tank (J): what pending changes may cost is taken off."""

    def __init__(self, config: TankConfig, held: Held, dt: float, error: Error = straight) -> None:
        held.check(config.late)
        self.config, self.held, self.error = config, held, error
        self.window = int(np.ceil(config.delay / dt - 1e-9))
        """Ticks that pass until a change's cost is known."""
        self.span = max(LEAST_WINDOW, 4 * config.delay)
        self._sure, self._still = SURE * config.noise, MOVED * config.noise
        self._far = self._sure + config.speed * config.delay
        """How far the arm may be from where it was measured, and from where it was seen last."""

    def begin(self, x: Floats, stiffness: Floats, now: float) -> None:
        """At rest at `x` [..., p], where the springs of `stiffness` [m] are, at `now` (s)."""
        batch, slots = x.shape[:-1], self.window + 1
        self._opened = np.full(batch, now)
        self.stiffness = np.broadcast_to(stiffness, self.error(x, x).shape).copy()
        self.setpoint, self.x = x.copy(), x.copy()
        self._level = np.full(batch, self.config.start)
        self._old = np.repeat(x[None], slots, 0)
        self._new = self._old.copy()
        self._soft = np.repeat(self.stiffness[None], slots, 0)
        self._hard = self._soft.copy()
        self._worst, self._guess = np.zeros((2, slots, *batch))
        self._at = 0
        self._from = self.x
        self._softest, self._stiffest = self.stiffness.copy(), self.stiffness.copy()
        self._softer, self._stiffer = self._softest, self._stiffest

    @property
    def level(self) -> Floats:
        # What a change gives back counts when it is certain.
        return self._level - np.maximum(np.maximum(self._worst, self._guess), 0.0).sum(0)

    def budget(self, dt: float) -> Floats:
        """[...] J that the next `dt` s may cost."""
        room = np.minimum(self.level - self.config.least, self.config.power * dt)
        return np.maximum(room, 0.0) + ROUNDING

    def command(self, setpoint: Floats, stiffness: Floats | None = None) -> None:
        """Since the newest measurement the springs' rest was put to `setpoint` [..., p], and their
        stiffness [..., m] was changed."""
        at, hard = self._at, self.stiffness if stiffness is None else stiffness
        self._new[at], self._hard[at] = setpoint, hard
        soft, old, new = (
            self._soft[at],
            self.error(self._old[at], self.x),
            self.error(setpoint, self.x),
        )
        self._worst[at] = self.held.cost(old, new, soft, hard, self._sure)
        self._guess[at] = self.held.cost(old, new, soft, hard, self._far)
        np.copyto(self.setpoint, setpoint)
        np.copyto(self.stiffness, hard)
        self._softest = np.minimum(self._softest, self.stiffness)
        self._stiffest = np.maximum(self._stiffest, self.stiffness)

    def measure(self, x: Floats, now: Floats | float) -> None:
        """The newest measurement [..., p], at `now` [...] (s)."""
        self._at = (self._at + 1) % (self.window + 1)
        self._settle(self._at)
        if not np.isfinite(x).all():
            return
        self.x = x.copy()
        if self.window:
            old, new = self.error(self._old, x), self.error(self._new, x)
            cost = self.held.cost(old, new, self._soft, self._hard, self._sure)
            np.maximum(self._worst, cost, out=self._worst)
        due = now - self._opened >= self.span
        if due.any():
            self._refill(now, due)

    def cost(self, setpoint: Floats, stiffness: Floats) -> Floats:
        """[G, ...] J at most, of changes to `setpoint` [G, ..., p] and `stiffness` [G, ..., m]."""
        old, new = self.error(self.setpoint, self.x), self.error(setpoint, self.x)
        return self.held.cost(old, new, self.stiffness, stiffness, self._far)

    def _settle(self, at: int) -> None:
        """The change of `window` ticks ago is over: what it cost at most is known."""
        self._level = np.minimum(self._level - self._worst[at], self.config.most)
        self._worst[at] = self._guess[at] = 0.0
        self._old[at], self._new[at] = self.setpoint, self.setpoint
        self._soft[at] = self._hard[at] = self.stiffness

    def _refill(self, now: Floats | float, due: NDArray[np.bool_]) -> None:
        """Of arms `due` [...]: damping took at least what a steady motion would have."""
        config = self.config
        moved = np.maximum(np.abs(self.error(self.x, self._from)) - self._still, 0.0)
        # What was measured in this window may have happened in the one before.
        softest = np.minimum(self._softest, self._softer)
        stiffest = np.maximum(self._stiffest, self._stiffer)
        lost = self.held.refilled(moved, softest, stiffest, config.late)
        refill = due * config.share * lost / np.maximum(now - self._opened + config.delay, 1e-9)
        self._level = np.minimum(self._level + refill, config.most)
        rows = due[..., None]
        self._softer = np.where(rows, self._softest, self._softer)
        self._stiffer = np.where(rows, self._stiffest, self._stiffer)
        self._softest = np.where(rows, self.stiffness, self._softest)
        self._stiffest = np.where(rows, self.stiffness, self._stiffest)
        self._opened = np.where(due, now, self._opened)
        self._from = np.where(rows, self.x, self._from)

    def get_state(self) -> dict[str, Floats]:
        """The books [B, ...] of a batch of arms that are measured without delay."""
        state = {name.lstrip("_"): getattr(self, name).copy() for name in ROWS}
        return state | {name.lstrip("_"): getattr(self, name)[0].copy() for name in CHANGES}

    def set_state(self, state: Mapping[str, Floats]) -> None:
        for name in ROWS:
            setattr(self, name, np.array(state[name.lstrip("_")]))
        for name in CHANGES:
            getattr(self, name)[0] = state[name.lstrip("_")]

    def restart(self, rows: Floats, x: Floats, stiffness: Floats) -> None:
        """Arms `rows` [B] (bool) begin anew at `x` [B, p], at time 0."""
        kept = self.get_state()
        self.begin(x, stiffness, 0.0)
        wide = {name: rows.reshape(-1, *[1] * (kept[name].ndim - 1)) for name in kept}
        new = self.get_state()
        self.set_state({name: np.where(wide[name], new[name], kept[name]) for name in kept})


class Impedance:
    """The set-point `place` [..., m] and the `stiffness` [..., m] of springs that a policy moves,
    made passive: a share a in [0, 1] of what is wanted is done. What becomes softer gives energy
    back, and is always done."""

    def __init__(self, config: TankConfig, held: Held, x: Floats, dt: float) -> None:
        self.tank, self.dt = Tank(config, held, dt), dt
        self.tank.begin(x, held.stiffness, 0.0)
        self.share: Any = np.ones(x.shape[:-1])
        self.asked, self.spent = np.zeros((2, *x.shape[:-1]))
        """J [...] that the newest wanted change would have cost, and that what was done costs."""

    @property
    def place(self) -> Floats:
        return self.tank.setpoint

    @property
    def stiffness(self) -> Floats:
        return self.tank.stiffness

    def __call__(self, x: Floats, now: Floats | float, place: Floats, stiffness: Floats) -> Floats:
        """The share [...] that is done of what is wanted, `place` and `stiffness` [..., m], for an
        arm measured at `x` [..., m]; the springs then are as `self.place`, `self.stiffness`."""
        tank = self.tank
        tank.measure(x, now)
        shares = SHARES.reshape(-1, *[1] * x.ndim)
        places = tank.setpoint + shares * (place - tank.setpoint)
        stiff = stiffer(tank.stiffness, stiffness, shares)
        cost = tank.cost(places, stiff)
        fine = cost <= tank.budget(self.dt)
        fine[-1] = True
        chosen = fine.argmax(0)
        self.asked, self.spent = cost[0], np.take_along_axis(cost, chosen[None], 0)[0]
        self.share = SHARES[chosen]
        share = self.share[..., None]
        tank.command(
            tank.setpoint + share * (place - tank.setpoint),
            stiffer(tank.stiffness, stiffness, share),
        )
        return self.share


def stiffer(now: Floats, wanted: Floats, share: Floats | float) -> Floats:
    """Stiffness that follows `wanted` downwards, and upwards by `share`."""
    return np.minimum(now, wanted) + share * np.maximum(wanted - now, 0.0)
