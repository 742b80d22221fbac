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
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Tick
from embodied.real_robot.kernel.driver import Springs
from embodied.real_robot.safety.energy_tank import SHARES, Held, Tank, TankConfig, stiffer, straight

Poses = Callable[[Floats], Floats]
"""A function of joint positions [k, n]: places of the springs' ends [k, p]."""
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
        self.share = 1.0
        """Share of the newest step that was done."""
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
