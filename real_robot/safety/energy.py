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
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Bound, Fraction
from embodied.core.build import ConfigError
from embodied.embodiments.fr3 import rotation_error
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Tick
from embodied.real_robot.kernel.driver import Springs

CERTAIN_DEVIATIONS = 2.0  # standard deviations by which a measured position may be off
MOTION_DEVIATIONS = 5.0  # standard deviations up to which a displacement is no motion
LEAST_WINDOW = 0.05  # s over which displacements are taken as dissipated
ROUNDING = 1e-12  # J
SHARES = np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0])
"""Shares of a wanted change that are tried, the largest first."""
BOOKS = (
    "booked_level", "window_start", "window_place", "x", "setpoint", "stiffness",
    "min_stiffness_window", "max_stiffness_window",
    "min_stiffness_previous", "max_stiffness_previous",
)  # fmt: skip
"""Arrays [...] that a tank keeps for each arm."""
PENDING = (
    "setpoint_before", "setpoint_after", "stiffness_before", "stiffness_after",
    "cost_measured", "cost_bound",
)  # fmt: skip
"""Arrays [slots, ...] of the changes whose cost is not known yet, one slot for each tick."""
Gain = Annotated[float, Bound(above=0.0, high=1e6)]
Error = Callable[[Floats, Floats], Floats]
"""A function of set-points `s` [..., p] and places `x` [..., p]: the stretch of the springs
[..., m]."""


@dataclass(frozen=True, kw_only=True)
class TankConfig:
    """The books of an energy tank."""

    start: Gain  # J in the tank at the start
    most: Gain  # J that the tank holds at most
    least: Gain  # J that always stay in the tank
    power: Gain  # W that the tank gives at most
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
    """Springs and dampers [m] that an arm is held with, as set up. With less stiffness the damping
    falls by its square root."""

    stiffness: Floats
    damping: Floats
    stretch: Floats  # stretch [m] (rad, m) beyond which the pull of a spring grows no more

    def check(self, late: float) -> None:
        """ConfigError where springs that know the position `late` s late give energy away."""
        wanting = self.damping < self.stiffness * late
        if wanting.any():
            raise ConfigError(
                f"safety.energy: springs of {self.stiffness.tolist()} that are {late:g} s late "
                f"need a damping of {(self.stiffness * late).tolist()} or more to be passive"
            )

    def stored(self, error: Floats) -> Floats:
        """Energy [..., m] (J) in springs of 1 N/m that are stretched by `error` [..., m]."""
        length = np.abs(error)
        linear = np.minimum(length, self.stretch)
        return linear * (length - 0.5 * linear)

    def cost(
        self,
        error_before: Floats,
        error_after: Floats,
        stiffness_before: Floats,
        stiffness_after: Floats,
        offset: float,
    ) -> Floats:
        """Largest energy [...] (J) that a change of the springs takes.

        Springs of `stiffness_before` are stretched by `error_before` [..., m]; then their stiffness
        and stretch are `stiffness_after`, `error_after`. Every stretch may be off by `offset`
        (rad, m).
        """
        length = np.abs(error_before)
        least_favourable = np.where(
            stiffness_after > stiffness_before, length + offset, np.maximum(length - offset, 0.0)
        )
        # First the stiffness changes where the set-point was, then the set-point moves.
        cost = (stiffness_after - stiffness_before) * self.stored(least_favourable)
        moved = offset * np.abs(error_after - error_before)
        cost += stiffness_after * (self.stored(error_after) - self.stored(error_before) + moved)
        return cost.sum(-1)

    def refilled(
        self, moved: Floats, min_stiffness: Floats, max_stiffness: Floats, late: float
    ) -> Floats:
        """Least energy times time (J s) that dampers take while the arm moves by `moved`."""
        damping = self.damping * np.sqrt(min_stiffness / self.stiffness) - late * max_stiffness
        return (np.maximum(damping, 0.0) * moved * moved).sum(-1)


def straight(s: Floats, x: Floats) -> Floats:
    """Stretch [..., m] of springs along the axes of the place: the `Error` of joints."""
    return s - x


class Tank:
    """The books of one arm, or of a batch of arms [...]. `level` [...] is what is certain to be
    in the tank (J): what pending changes may cost is taken off."""

    def __init__(self, config: TankConfig, held: Held, dt: float, error: Error = straight) -> None:
        held.check(config.late)
        self.config = config
        self.held = held
        self.error = error
        self.delay_ticks = int(np.ceil(config.delay / dt - 1e-9))
        """Ticks that pass until a change's cost is known."""
        self.window_length = max(LEAST_WINDOW, 4 * config.delay)
        """Time (s) over which a displacement is taken as dissipated."""
        self.position_error = CERTAIN_DEVIATIONS * config.noise
        """Distance (rad, m) by which a measured position may be off."""
        self.least_motion = MOTION_DEVIATIONS * config.noise
        """Displacement (rad, m) that may be noise."""
        self.place_error = self.position_error + config.speed * config.delay
        """Distance (rad, m) between the arm now and its newest measurement, at most."""

    def begin(self, x: Floats, stiffness: Floats, now: float) -> None:
        """Start at rest at `x` [..., p], with springs of `stiffness` [m] there, at `now` (s)."""
        batch = x.shape[:-1]
        slots = self.delay_ticks + 1
        self.stiffness = np.broadcast_to(stiffness, self.error(x, x).shape).copy()
        self.setpoint = x.copy()
        self.x = x.copy()
        self.booked_level = np.full(batch, self.config.start)
        self.setpoint_before = np.repeat(x[None], slots, 0)
        self.setpoint_after = self.setpoint_before.copy()
        self.stiffness_before = np.repeat(self.stiffness[None], slots, 0)
        self.stiffness_after = self.stiffness_before.copy()
        self.cost_measured = np.zeros((slots, *batch))
        """Largest cost (J) of each change at any measurement since."""
        self.cost_bound = np.zeros((slots, *batch))
        """Largest cost (J) of each change wherever the arm may be."""
        self.slot = 0
        self.window_start = np.full(batch, now)
        self.window_place = self.x
        self.min_stiffness_window = self.stiffness.copy()
        self.max_stiffness_window = self.stiffness.copy()
        self.min_stiffness_previous = self.min_stiffness_window
        self.max_stiffness_previous = self.max_stiffness_window

    @property
    def level(self) -> Floats:
        """Energy [...] (J) that is certain to be in the tank."""
        # What a change gives back counts when it is certain.
        pending = np.maximum(np.maximum(self.cost_measured, self.cost_bound), 0.0)
        return self.booked_level - pending.sum(0)

    def budget(self, dt: float) -> Floats:
        """Energy [...] (J) that the next `dt` s may cost."""
        room = np.minimum(self.level - self.config.least, self.config.power * dt)
        return np.maximum(room, 0.0) + ROUNDING

    def command(self, setpoint: Floats, stiffness: Floats | None = None) -> None:
        """Book that the springs' rest was put to `setpoint` [..., p] since the newest measurement,
        and their stiffness changed to `stiffness` [..., m]."""
        slot = self.slot
        stiffness_after = self.stiffness if stiffness is None else stiffness
        self.setpoint_after[slot] = setpoint
        self.stiffness_after[slot] = stiffness_after
        change = (
            self.error(self.setpoint_before[slot], self.x),
            self.error(setpoint, self.x),
            self.stiffness_before[slot],
            stiffness_after,
        )
        self.cost_measured[slot] = self.held.cost(*change, self.position_error)
        self.cost_bound[slot] = self.held.cost(*change, self.place_error)
        np.copyto(self.setpoint, setpoint)
        np.copyto(self.stiffness, stiffness_after)
        self.min_stiffness_window = np.minimum(self.min_stiffness_window, self.stiffness)
        self.max_stiffness_window = np.maximum(self.max_stiffness_window, self.stiffness)

    def measure(self, x: Floats, now: Floats | float) -> None:
        """Book the newest measurement [..., p], made at `now` [...] (s)."""
        self.slot = (self.slot + 1) % (self.delay_ticks + 1)
        self._close_change(self.slot)
        if not np.isfinite(x).all():
            return
        self.x = x.copy()
        if self.delay_ticks:
            cost = self.held.cost(
                self.error(self.setpoint_before, x),
                self.error(self.setpoint_after, x),
                self.stiffness_before,
                self.stiffness_after,
                self.position_error,
            )
            np.maximum(self.cost_measured, cost, out=self.cost_measured)
        due = now - self.window_start >= self.window_length
        if due.any():
            self._refill(now, due)

    def cost(self, setpoint: Floats, stiffness: Floats) -> Floats:
        """Largest energy [G, ...] (J) of changes to `setpoint` and `stiffness` [G, ..., p or m]."""
        error_before = self.error(self.setpoint, self.x)
        error_after = self.error(setpoint, self.x)
        return self.held.cost(
            error_before, error_after, self.stiffness, stiffness, self.place_error
        )

    def _close_change(self, slot: int) -> None:
        """Take the cost of the change of `delay_ticks` ticks ago off the level: it is known."""
        booked = self.booked_level - self.cost_measured[slot]
        self.booked_level = np.minimum(booked, self.config.most)
        self.cost_measured[slot] = 0.0
        self.cost_bound[slot] = 0.0
        self.setpoint_before[slot] = self.setpoint
        self.setpoint_after[slot] = self.setpoint
        self.stiffness_before[slot] = self.stiffness
        self.stiffness_after[slot] = self.stiffness

    def _refill(self, now: Floats | float, due: NDArray[np.bool_]) -> None:
        """Close windows of arms `due` [...]: damping took what a steady motion loses, or more."""
        config = self.config
        distance = np.abs(self.error(self.x, self.window_place))
        moved = np.maximum(distance - self.least_motion, 0.0)
        # What was measured in this window may have happened in the one before.
        min_stiffness = np.minimum(self.min_stiffness_window, self.min_stiffness_previous)
        max_stiffness = np.maximum(self.max_stiffness_window, self.max_stiffness_previous)
        lost = self.held.refilled(moved, min_stiffness, max_stiffness, config.late)
        time = np.maximum(now - self.window_start + config.delay, 1e-9)
        refill = due * config.share * lost / time
        self.booked_level = np.minimum(self.booked_level + refill, config.most)
        closed = due[..., None]
        self.min_stiffness_previous = np.where(
            closed, self.min_stiffness_window, self.min_stiffness_previous
        )
        self.max_stiffness_previous = np.where(
            closed, self.max_stiffness_window, self.max_stiffness_previous
        )
        self.min_stiffness_window = np.where(closed, self.stiffness, self.min_stiffness_window)
        self.max_stiffness_window = np.where(closed, self.stiffness, self.max_stiffness_window)
        self.window_start = np.where(due, now, self.window_start)
        self.window_place = np.where(closed, self.x, self.window_place)

    def get_state(self) -> dict[str, Floats]:
        """The books [B, ...] of a batch of arms that are measured without delay."""
        state = {name: getattr(self, name).copy() for name in BOOKS}
        return state | {name: getattr(self, name)[0].copy() for name in PENDING}

    def set_state(self, state: Mapping[str, Floats]) -> None:
        for name in BOOKS:
            setattr(self, name, np.array(state[name]))
        for name in PENDING:
            getattr(self, name)[0] = state[name]

    def restart(self, begins: Floats, x: Floats, stiffness: Floats) -> None:
        """Begin the books of the arms `begins` [B] (bool) anew at `x` [B, p], at time 0."""
        kept = self.get_state()
        self.begin(x, stiffness, 0.0)
        new = self.get_state()
        for name, before in kept.items():
            wide = begins.reshape(-1, *[1] * (before.ndim - 1))
            new[name] = np.where(wide, new[name], before)
        self.set_state(new)


def stiffer(now: Floats, wanted: Floats, share: Floats | float) -> Floats:
    """Stiffness [..., m] that follows `wanted` downwards, and upwards by `share` of the way."""
    return np.minimum(now, wanted) + share * np.maximum(wanted - now, 0.0)


Poses = Callable[[Floats], Floats]
"""A function of joint positions [k, n]: places of the springs' ends [k, p]."""


@dataclass(frozen=True, kw_only=True)
class Config(TankConfig):
    """The tank, and the springs and dampers that the driver holds the arm with: on each joint, or
    with `frame: tool` on the tool's place (x, y, z) and the turn about these axes."""

    stiffness: tuple[Gain, ...]  # N m/rad of each joint; of the tool N/m (3), N m/rad (3)
    damping: tuple[Annotated[float, Bound(0.0, 1e6)], ...]  # N m s/rad; of the tool N s/m (3) too
    stretch: tuple[Gain, ...] = ()  # rad (m) beyond which a spring pulls no more; empty: no bound
    frame: Literal["joints", "tool"] = "joints"  # what the springs are on

    def __post_init__(self) -> None:
        super().__post_init__()
        springs = np.asarray((*self.stiffness, *self.damping, *self.stretch))
        if not ((springs >= 0) & (springs < np.inf)).all():
            raise ConfigError(
                "safety.energy: stiffness, damping and stretch should be 0 or more, finite"
            )


def held(config: Config, joints: int) -> Held:
    """The springs of the settings; ConfigError where they do not fit."""
    count = 6 if config.frame == "tool" else joints
    stiffness = np.asarray(config.stiffness, float)
    damping = np.asarray(config.damping, float)
    stretch = np.asarray(config.stretch or (np.inf,) * count, float)
    if not all(each.shape == (count,) for each in (stiffness, damping, stretch)):
        raise ConfigError(f"safety.energy needs {count} stiffnesses and dampings ({config.frame})")
    if not (stiffness > 0).all() or not (stretch > 0).all():
        raise ConfigError("safety.energy: stiffness and stretch should be above 0")
    return Held(stiffness, damping, stretch)


def tool_error(s: Floats, x: Floats) -> Floats:
    """Difference [..., 6] from tool poses `x` [..., 12] to `s` [..., 12]: the way (m) and the
    rotation vector (rad) in the base frame. A pose is a place (m) and a rotation matrix."""
    s, x = np.broadcast_arrays(s, x)
    shape = s.shape[:-1]
    turns = (each[..., 3:].reshape(-1, 3, 3) for each in (s, x))
    turn = rotation_error(*turns).reshape(*shape, 3)
    return np.concatenate([s[..., :3] - x[..., :3], turn], -1)


class Energy:
    """The stage lets a step be done as far as the tank can pay for it. The way that the limits need
    to stop the set-point is counted with every step, or the tank would be overdrawn by that much.
    """

    name: ClassVar[str] = "energy"

    def __init__(
        self, config: Config, limits: Limits, dt: float, poses: Poses | None = None
    ) -> None:
        """`poses` gives the tool's poses [k, 12] (m; rotation matrices), for `frame: tool`."""
        if config.frame == "tool" and poses is None:
            raise ConfigError("safety.energy: frame: tool needs the tool's pose (kinematics)")
        self._poses = poses if config.frame == "tool" else None
        error = straight if self._poses is None else tool_error
        self.held = held(config, len(limits))
        self.dt = dt
        self.frame = config.frame
        self.tank = Tank(config, self.held, dt, error)
        self.max_step = np.asarray(limits.velocity) * dt
        self.acceleration = np.asarray(limits.acceleration)
        self.jerk = np.asarray(limits.jerk)
        self.share = 1.0  # share of the newest step that was done
        self._shares = SHARES[:, None]
        self._last_sent = np.zeros(len(limits))
        self._last_rate = np.zeros(len(limits))
        self._joints = np.zeros((3, len(limits)))
        self._sent_stiffness: Floats | None = None
        """Stiffness [m] that goes out with the newest set-point; None: it was not changed."""
        self._springs_changed = False
        self._restore_springs = False

    def check(self, springs: Springs | None) -> None:
        """ConfigError where the driver holds the arm with other springs than the tank books."""
        if springs is None:
            return
        if springs.frame != self.frame:
            raise ConfigError(
                f"safety.energy: frame is {self.frame}, the driver's springs are on the "
                f"{springs.frame}"
            )
        for name in ("stiffness", "stretch"):
            ours: Floats = getattr(self.held, name)
            theirs: Floats = getattr(springs, name)
            if not np.allclose(ours, theirs, rtol=0.01):
                raise ConfigError(
                    f"safety.energy: {name} is {ours.tolist()}, the driver's is "
                    f"{np.round(theirs, 4).tolist()}"
                )
        if not (self.held.damping <= 1.01 * springs.damping).all():
            raise ConfigError(
                f"safety.energy: damping is {self.held.damping.tolist()}, the driver's is only "
                f"{np.round(springs.damping, 4).tolist()}"
            )

    def begin(self, arm: ArmState) -> None:
        self._last_sent[:] = arm.q
        self._last_rate[:] = 0.0
        self._sent_stiffness = None
        self._restore_springs = self._springs_changed  # they may still be soft
        self.tank.begin(self._place(arm.q[None])[0], self.held.stiffness, arm.t)

    def __call__(self, tick: Tick) -> None:
        step = np.clip(tick.q - tick.last, -self.max_step, self.max_step)
        whole = step + self._way_to_rest(tick.last)
        self._joints[:] = tick.last, tick.arm.q, tick.last + whole
        last, measured, after = self._place(self._joints)
        self.tank.command(last, self._sent_stiffness)
        self.tank.measure(measured, tick.now)
        stiffness = self._wanted_stiffness(tick)
        chosen = self._affordable(after[None], self._shares[:1], stiffness)
        if chosen:
            places = self._place(tick.last + self._shares * whole)
            chosen = self._affordable(places, self._shares, stiffness)
            np.multiply(step, SHARES[chosen], out=tick.q)
            tick.q += tick.last
        self.share = float(SHARES[chosen])
        self._send_stiffness(tick, stiffness)

    def _way_to_rest(self, last: Floats) -> Floats:
        """Way [n] (rad, m) that a set-point at `last` [n] goes on until the limits have stopped it.

        With speed v and acceleration a >= 0 at most jerk j and deceleration d: a falls to 0, then
        v' = |v| + a^2 / (2 j), and the way is at most v' / 2 (v' / d + (2 a + d) / j)."""
        rate = (last - self._last_sent) / self.dt
        gain = np.maximum((rate - self._last_rate) * np.sign(rate) / self.dt, 0.0)
        self._last_rate[:] = rate
        self._last_sent[:] = last
        speed = np.abs(rate) + 0.5 * gain * gain / self.jerk
        time = speed / self.acceleration + (2 * gain + self.acceleration) / self.jerk
        way = 0.5 * speed * time
        return np.sign(rate) * way

    def _affordable(self, places: Floats, shares: Floats, stiffness: Floats) -> int:
        """Number of the first of `shares` [k, 1] that the tank can pay for; else that of the last
        of all `SHARES`, which is 0.

        `places` [k, p] are the set-points of the shares, `stiffness` [m] is what is wanted."""
        tank = self.tank
        cost = tank.cost(places, stiffer(tank.stiffness, stiffness, shares))
        paid = cost <= tank.budget(self.dt)
        return int(paid.argmax()) if paid.any() else len(SHARES) - 1

    def _wanted_stiffness(self, tick: Tick) -> Floats:
        """Stiffness [m] that the tick asks for; the present one where it asks for none."""
        if tick.stiffness is None and self._restore_springs:
            tick.stiffness = self.held.stiffness
        self._restore_springs = False
        wanted = tick.stiffness
        if wanted is None:
            return self.tank.stiffness
        if wanted.shape != self.held.stiffness.shape or not np.isfinite(wanted).all():
            tick.fail(f"a stiffness {np.round(wanted, 2)} is none of the arm's")
            return self.tank.stiffness
        return wanted

    def _send_stiffness(self, tick: Tick, wanted: Floats) -> None:
        """Pass `wanted` [m] on, as far as it is paid for; it is sent with the next set-point."""
        self._sent_stiffness = None
        if tick.stiffness is not None:
            self._springs_changed = True
            tick.stiffness = stiffer(self.tank.stiffness, wanted, self.share)
            self._sent_stiffness = tick.stiffness

    def _place(self, q: Floats) -> Floats:
        """Places [k, p] of the springs' ends at joint positions `q` [k, n]."""
        return q if self._poses is None else self._poses(q)
