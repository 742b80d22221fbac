"""Energy tank: a bounded budget for the energy that a moving set-point puts into an arm.

Variable impedance with an energy tank (Ferraguti et al., 2013; Zanella et al., 2024). Springs of
constant stiffness around a resting set-point are passive. Whatever adds energy beyond that draws it
from a tank, which damping refills; a step that the tank cannot afford is made smaller. Work is
booked from measured displacements after the fact, so integration errors cannot create energy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from embodied.core.build import ConfigError
from real_robot.control.arm_state import ArmState, Floats, Limits
from real_robot.safety.chain import Tick


@dataclass(frozen=True, kw_only=True)
class TankConfig:
    """J: `start`, `most` and `least` in the tank; `power` (W) that it gives at most; `share` of
    what damping dissipates that goes back into it."""

    start: float
    most: float
    least: float
    power: float
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.start <= self.most or self.power <= 0:
            raise ConfigError("safety.energy needs 0 < least <= start <= most and power above 0")
        if not 0 <= self.share <= 1:
            raise ConfigError("safety.energy: share should be between 0 and 1")


class Tank:
    """`level` (J)."""

    def __init__(self, config: TankConfig) -> None:
        self.config, self.level = config, config.start

    def book(self, spent: float, dissipated: float) -> None:
        """What was really spent (negative: given back) and dissipated in a tick, J."""
        refill = self.config.share * max(dissipated, 0.0)
        self.level = min(self.level - spent + refill, self.config.most)

    def budget(self, dt: float) -> float:
        """What the next `dt` s may cost, J."""
        return max(0.0, min(self.level - self.config.least, self.config.power * dt))


@dataclass(frozen=True, kw_only=True)
class Config(TankConfig):
    """And the springs and dampers (N m/rad, N m s/rad) that the driver holds each joint with."""

    stiffness: tuple[float, ...]
    damping: tuple[float, ...]


class Energy:
    """The set-point of joint springs moves no further than the tank can pay for.

    Moving the set-point by d, at stretch s, puts K (s + d / 2) d into the springs. The way that the
    limits need to stop it is counted with every step, or the tank would be overdrawn by that much.
    """

    name: ClassVar[str] = "energy"

    def __init__(self, config: Config, limits: Limits, dt: float) -> None:
        if not len(config.stiffness) == len(config.damping) == len(limits):
            raise ConfigError(f"safety.energy needs {len(limits)} stiffnesses and dampings")
        self.stiffness, self.damping = np.asarray(config.stiffness), np.asarray(config.damping)
        self.stride, self.dt = np.asarray(limits.velocity) * dt, dt
        self.slowing = np.asarray(limits.acceleration)
        self.tank = Tank(config)
        self._sent, self._q = np.zeros(len(limits)), np.zeros(len(limits))

    def begin(self, arm: ArmState) -> None:
        self.tank.level = self.tank.config.start
        self._sent[:], self._q[:] = arm.q, arm.q

    def __call__(self, tick: Tick) -> None:
        rate = (tick.last - self._sent) / self.dt
        self._settle(tick)
        way = rate * np.abs(rate) / (2 * self.slowing)
        step = np.clip(tick.q - tick.last, -self.stride, self.stride)
        stretch = tick.last - tick.arm.q
        whole = step + way
        linear = float(self.stiffness @ (stretch * whole))
        square = 0.5 * float(self.stiffness @ (whole * whole))
        share = affordable(linear, square, self.tank.budget(self.dt))
        if share < 1:
            np.multiply(step, share, out=tick.q)
            tick.q += tick.last

    def _settle(self, tick: Tick) -> None:
        """Book the tick before: the step that was sent, at the stretch that was measured then."""
        step = tick.last - self._sent
        spent = float(self.stiffness @ ((self._sent + 0.5 * step - self._q) * step))
        lost = float(self.damping @ (tick.arm.dq * tick.arm.dq)) * self.dt
        self.tank.book(spent, lost if np.isfinite(lost) else 0.0)
        np.copyto(self._sent, tick.last)
        if np.isfinite(tick.arm.q).all():
            np.copyto(self._q, tick.arm.q)


def affordable(linear: float, square: float, budget: float) -> float:
    """The largest share x in [0, 1] of a step for which linear x + square x^2 <= budget at every
    share up to x; `square` is not negative."""
    if linear + square <= budget:
        return 1.0
    if square < 1e-15:
        return max(0.0, min(1.0, budget / linear))
    root = (linear * linear + 4 * square * budget) ** 0.5
    return max(0.0, min(1.0, (root - linear) / (2 * square)))


@dataclass(frozen=True, kw_only=True)
class ImpedanceConfig(TankConfig):
    """And the constant part of the stiffness (N/m for each axis), which no command goes below."""

    constant: tuple[float, ...]


class Impedance:
    """A Cartesian spring whose stiffness and set-point a policy moves, made passive.

    force = K_0 e + a (K - K_0) e, e = x_d - x, and the set-point moves by a times what is wanted;
    the power that is not a spring's, P = v' (K - K_0) e + x_d' K_0 e, is scaled by a in [0, 1].
    """

    def __init__(self, config: ImpedanceConfig, x: Floats) -> None:
        self.constant, self.tank = np.asarray(config.constant), Tank(config)
        self.place = np.array(x, dtype=float)
        """Of the set-point [m]."""
        self.share, self._pays, self._extra = 1.0, 0.0, np.zeros_like(self.place)

    def __call__(
        self, x: Floats, v: Floats, wanted: Floats, stiffness: Floats, dt: float
    ) -> Floats:
        """The spring's force [m] (N) for the next `dt` s; `wanted` [m] is how the set-point should
        move (m/s), `stiffness` [m] (N/m) what it should be held with."""
        more = np.maximum(stiffness - self.constant, 0.0)
        e = self.place - x
        asked = (float(v @ (more * e)) + float(wanted @ (self.constant * e))) * dt
        budget = self.tank.budget(dt)
        self.share = 1.0 if asked <= 0 else min(1.0, budget / asked)
        if self.tank.level <= self.tank.config.least:
            self.share = 0.0
        step = self.share * wanted * dt
        self._pays = float((self.constant * (e + 0.5 * step)) @ step)
        self.place = self.place + step
        self._extra = self.share * more * (self.place - x)
        return self.constant * (self.place - x) + self._extra

    def settle(self, moved: Floats, damping: Floats, v: Floats, dt: float) -> None:
        """Book the tick: the arm moved by `moved` [m] under the last force, against `damping`
        [m] (N s/m) at `v` [m]."""
        self.tank.book(self._pays + float(self._extra @ moved), float(damping @ (v * v)) * dt)
