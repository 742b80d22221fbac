"""Springs that a policy moves and stiffens, with an energy tank in front of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.safety.energy import SHARES, Held, Tank, TankConfig, stiffer


class FilteredSprings:
    """A set-point and a stiffness [..., m] of which only the share that the tank pays for is done.
    What becomes softer gives energy back, and is always done."""

    def __init__(self, config: TankConfig, held: Held, x: Floats, dt: float) -> None:
        self.tank = Tank(config, held, dt)
        self.tank.begin(x, held.stiffness, 0.0)
        self.dt = dt

    @property
    def place(self) -> Floats:
        return self.tank.setpoint

    @property
    def stiffness(self) -> Floats:
        return self.tank.stiffness

    def __call__(self, x: Floats, now: Floats | float, place: Floats, stiffness: Floats) -> Any:
        """The share [...] that is done of `place` and `stiffness` [..., m], for an arm measured at
        `x` [..., m]."""
        tank = self.tank
        tank.measure(x, now)
        shares = SHARES.reshape(-1, *[1] * x.ndim)
        places = tank.setpoint + shares * (place - tank.setpoint)
        cost = tank.cost(places, stiffer(tank.stiffness, stiffness, shares))
        affordable = cost <= tank.budget(self.dt)
        affordable[-1] = True
        done = SHARES[affordable.argmax(0)]
        share = done[..., None]
        tank.command(
            tank.setpoint + share * (place - tank.setpoint),
            stiffer(tank.stiffness, stiffness, share),
        )
        return done


COUPLED, SHOULDER, ELBOW = 0.12, 0.62, 0.16  # kg m^2, of M(q) = [[a + 2 c cos, d + c cos], [., d]]
UPPER, FORE = 0.4, 0.3  # m


def inertia(q: Floats) -> Floats:
    """[..., 2, 2] at q [..., 2]."""
    c = COUPLED * np.cos(q[..., 1])
    row = np.stack([SHOULDER + 2 * c, ELBOW + c], -1)
    return np.stack([row, np.stack([ELBOW + c, np.full_like(c, ELBOW)], -1)], -2)


def accelerated(q: Floats, torque: Floats) -> Floats:
    """[..., 2] rad/s^2 by `torque` [..., 2]: the inverse of a 2 x 2 matrix, written out."""
    c = COUPLED * np.cos(q[..., 1])
    a, b, first, second = SHOULDER + 2 * c, ELBOW + c, torque[..., 0], torque[..., 1]
    one, two = ELBOW * first - b * second, a * second - b * first
    return np.stack([one, two], -1) / (a * ELBOW - b * b)[..., None]


def tool(q: Floats) -> Floats:
    """Where the tool is [..., 2], m."""
    a, b = q[..., 0], q[..., 0] + q[..., 1]
    x, y = UPPER * np.cos(a) + FORE * np.cos(b), UPPER * np.sin(a) + FORE * np.sin(b)
    return np.stack([x, y], -1)


def jacobian(q: Floats) -> Floats:
    """Of the tool [..., 2, 2]."""
    a, b = q[..., 0], q[..., 0] + q[..., 1]
    left, below = -FORE * np.sin(b), FORE * np.cos(b)
    top = np.stack([left - UPPER * np.sin(a), left], -1)
    return np.stack([top, np.stack([below + UPPER * np.cos(a), below], -1)], -2)


@dataclass
class TwoLink:
    """`q`, `dq` [..., 2]; no gravity. Springs and dampers on the joints, or `on_tool`. `given`:
    work [...] that the outside torques have done, J. `felt` [..., 2]: where springs that are late
    take the arm to be (None: where it is)."""

    q: Floats
    dq: Floats
    stiffness: Floats
    damping: Floats
    on_tool: bool = False
    felt: Floats | None = None

    def __post_init__(self) -> None:
        self.setpoint = self.place.copy()
        self.given = np.zeros(self.q.shape[:-1])

    @property
    def place(self) -> Floats:
        """Of the springs' ends [..., 2]."""
        return tool(self.q) if self.on_tool else self.q

    def run(self, seconds: float, push: Floats, step: float = 1e-3) -> None:
        """Under `push` [..., 2] (N m) from outside; symplectic Euler steps."""
        for _ in range(round(seconds / step)):
            q, dq = self.q, self.dq
            h = COUPLED * np.sin(q[..., 1])
            bias = np.stack(
                [-h * (2 * dq[..., 0] * dq[..., 1] + dq[..., 1] ** 2), h * dq[..., 0] ** 2], -1
            )
            self.dq = dq + step * accelerated(q, self._held() + push - bias)
            self.q = q + step * self.dq
            self.given += (push * (self.q - q)).sum(-1)

    def _held(self) -> Floats:
        e = self.setpoint - (self.place if self.felt is None else self.felt)
        if not self.on_tool:
            return self.stiffness * e - self.damping * self.dq
        turn = jacobian(self.q)
        speed = (turn @ self.dq[..., None])[..., 0]
        force = self.stiffness * e - self.damping * speed
        return (turn.swapaxes(-1, -2) @ force[..., None])[..., 0]

    def energy(self) -> Floats:
        """Kinetic and in the springs [...], J."""
        moving = 0.5 * np.einsum("...i,...ij,...j->...", self.dq, inertia(self.q), self.dq)
        return moving + 0.5 * (self.stiffness * (self.setpoint - self.place) ** 2).sum(-1)
