"""Springs that a policy moves and stiffens, with an energy tank in front of them."""

from __future__ import annotations

from typing import Any

from embodied.real_robot.control.arm_state import Floats
from embodied.real_robot.safety.energy_tank import SHARES, Held, Tank, TankConfig, stiffer


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
