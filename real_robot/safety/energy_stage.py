"""Safety stage: the set-point of an arm's springs moves, and the springs stiffen, no further than
the energy tank can pay for (`embodied.real_robot.safety.energy_tank`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.embodiments.fr3 import rotation_error
from embodied.real_robot.control.arm_state import ArmState, Floats, Limits
from embodied.real_robot.drivers.springs import Springs
from embodied.real_robot.safety.chain import Tick
from embodied.real_robot.safety.energy_tank import SHARES, Held, Tank, TankConfig, stiffer, straight

Poses = Callable[[Floats], Floats]
"""The places of the springs' ends [k, p] at joint positions [k, n]."""
Gain = Annotated[float, Bound(above=0.0, high=1e6)]


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
    m = 6 if config.frame == "tool" else joints
    stretch = config.stretch if config.stretch else (np.inf,) * m
    parts = [np.asarray(v, float) for v in (config.stiffness, config.damping, stretch)]
    if not all(part.shape == (m,) for part in parts):
        raise ConfigError(f"safety.energy needs {m} stiffnesses and dampings ({config.frame})")
    if not (parts[0] > 0).all() or not (parts[2] > 0).all():
        raise ConfigError("safety.energy: stiffness and stretch should be above 0")
    return Held(*parts)


def tool_error(s: Floats, x: Floats) -> Floats:
    """From tool poses x [..., 12] to s [..., 12], place (m) and rotation matrix: [..., 6] (m, and
    the rotation vector in rad, base frame)."""
    s, x = np.broadcast_arrays(s, x)
    shape = s.shape[:-1]
    turns = (each[..., 3:].reshape(-1, 3, 3) for each in (s, x))
    turn = rotation_error(*turns).reshape(*shape, 3)
    return np.concatenate([s[..., :3] - x[..., :3], turn], -1)


class Energy:
    """The way that the limits need to stop a set-point is counted with every step, or the tank
    would be overdrawn by that much. `share` is what was done of the newest step."""

    name: ClassVar[str] = "energy"

    def __init__(
        self, config: Config, limits: Limits, dt: float, poses: Poses | None = None
    ) -> None:
        """`poses`: the tool's [k, 12] (m; rotation matrices), for `frame: tool`."""
        if config.frame == "tool" and poses is None:
            raise ConfigError("safety.energy: frame: tool needs the tool's pose (kinematics)")
        self._poses = poses if config.frame == "tool" else None
        error = straight if self._poses is None else tool_error
        self.held, self.dt, self.frame = held(config, len(limits)), dt, config.frame
        self.tank = Tank(config, self.held, dt, error)
        self.stride = np.asarray(limits.velocity) * dt
        self.slowing, self.jerk = np.asarray(limits.acceleration), np.asarray(limits.jerk)
        self._sent, self._shares = np.zeros(len(limits)), SHARES[:, None]
        self._rate = np.zeros(len(limits))
        self._three = np.zeros((3, len(limits)))
        self._stiffness: Floats | None = None
        self._changed = self._restore = False
        self.share = 1.0

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
        self._sent[:], self._rate[:] = arm.q, 0.0
        self._stiffness, self._restore = None, self._changed  # springs may still be soft
        self.tank.begin(self._place(arm.q[None])[0], self.held.stiffness, arm.t)

    def __call__(self, tick: Tick) -> None:
        step = np.clip(tick.q - tick.last, -self.stride, self.stride)
        whole = step + self._way(tick.last)
        self._three[:] = tick.last, tick.arm.q, tick.last + whole
        last, measured, then = self._place(self._three)
        self.tank.command(last, self._stiffness)
        self.tank.measure(measured, tick.now)
        stiffness = self._wanted(tick)
        chosen = self._afford(then[None], self._shares[:1], stiffness)
        if chosen:
            places = self._place(tick.last + self._shares * whole)
            chosen = self._afford(places, self._shares, stiffness)
            np.multiply(step, SHARES[chosen], out=tick.q)
            tick.q += tick.last
        self.share = float(SHARES[chosen])
        self._stiffen(tick, stiffness)

    def _way(self, last: Floats) -> Floats:
        """How far a set-point goes on until the limits have stopped it [n]."""
        rate = (last - self._sent) / self.dt
        faster = np.maximum((rate - self._rate) * np.sign(rate) / self.dt, 0.0)
        self._rate[:], self._sent[:] = rate, last
        speed = np.abs(rate) + 0.5 * faster * faster / self.jerk
        way = 0.5 * speed * (speed / self.slowing + (2 * faster + self.slowing) / self.jerk)
        return np.sign(rate) * way

    def _afford(self, places: Floats, shares: Floats, stiffness: Floats) -> int:
        """The number of the first of `shares` [k, 1] that the tank can pay for; k: none."""
        tank = self.tank
        cost = tank.cost(places, stiffer(tank.stiffness, stiffness, shares))
        fine = cost <= tank.budget(self.dt)
        return int(fine.argmax()) if fine.any() else len(SHARES) - 1

    def _wanted(self, tick: Tick) -> Floats:
        if tick.stiffness is None and self._restore:
            tick.stiffness = self.held.stiffness
        self._restore = False
        wanted = tick.stiffness
        if wanted is None:
            return self.tank.stiffness
        if wanted.shape != self.held.stiffness.shape or not np.isfinite(wanted).all():
            tick.fault = tick.fault or f"a stiffness {np.round(wanted, 2)} is none of the arm's"
            return self.tank.stiffness
        return wanted

    def _stiffen(self, tick: Tick, wanted: Floats) -> None:
        """Pass a stiffness on, as far as it is paid for; it is sent with the next set-point."""
        self._stiffness = None
        if tick.stiffness is not None:
            self._changed = True
            tick.stiffness = stiffer(self.tank.stiffness, wanted, self.share)
            self._stiffness = tick.stiffness

    def _place(self, q: Floats) -> Floats:
        return q if self._poses is None else self._poses(q)
