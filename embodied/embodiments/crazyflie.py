"""Physical parameters of the Crazyflie 2.x quadrotor: rotors, mass, motors and limits.

`PAPER` has the parameters of Learning to Fly in Seconds (Eschmann et al., 2024). `LIBRARY` has the
newer identification from the same authors' library (with decks, and motors that speed up faster
than they slow down). The rotor speed is the fraction u in [0, 1] of its maximum:

    thrust(u) = c_0 + c_1 u + c_2 u^2  (N),   u' = (command - u) / (rise or fall),
    command = (action + 1) / 2,   speed = u * top_rpm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GRAVITY = 9.81
"""m/s^2."""
RATE = 100.0
"""Commands a second."""
BOX = 0.6
"""Half the side of the cube around the target in which flights are kept, m."""
MOTORS = ("front_right", "back_right", "back_left", "front_left")
Vector = tuple[float, float, float]


@dataclass(frozen=True)
class Vehicle:
    """One parameter set; x is forward, y left, z up, rotors in the order of `MOTORS`.

    `inertia` about x, y, z (kg m^2); `thrust` of one rotor (N): constant, linear and quadratic
    coefficient in u; `torque`: spin torque per thrust (m); `rise` and `fall`: time constants of a
    motor (s); `rotors`: places (m); `spins`: signs of the torque that a rotor exerts about z.
    """

    mass: float  # kg
    inertia: Vector
    thrust: Vector
    torque: float
    rise: float
    fall: float
    top_rpm: float = 21702.0
    rotors: tuple[Vector, ...] = (
        (0.028, -0.028, 0.0),
        (-0.028, -0.028, 0.0),
        (-0.028, 0.028, 0.0),
        (0.028, 0.028, 0.0),
    )
    spins: tuple[float, ...] = (-1.0, 1.0, -1.0, 1.0)

    @property
    def weight(self) -> float:
        """N."""
        return self.mass * GRAVITY

    @property
    def hover(self) -> float:
        """The action of all four motors that balances the weight; ValueError if it is
        out of range.
        """
        return 2 * self.speed(self.weight / len(self.rotors)) - 1

    @property
    def lift(self) -> float:
        """Largest thrust over weight."""
        return len(self.rotors) * sum(self.thrust) / self.weight

    def speed(self, thrust: float) -> float:
        """The fraction u of the highest speed at which one rotor pulls `thrust` (N).

        ValueError when it cannot pull that much or that little.
        """
        c0, c1, c2 = self.thrust
        if not c0 <= thrust <= c0 + c1 + c2:
            raise ValueError(
                f"the thrust of a rotor is {c0:.4f} to {c0 + c1 + c2:.4f} N, got {thrust:.4f} N"
            )
        return (math.sqrt(c1 * c1 + 4 * c2 * (thrust - c0)) - c1) / (2 * c2)

    @property
    def mixer(self) -> tuple[tuple[float, ...], ...]:
        """[4, rotors]: thrusts to total thrust (N) and torques about x and y (N m), and about z in
        units of the spin torque per thrust."""
        lift = tuple(1.0 for _ in self.rotors)
        roll = tuple(y for _, y, _ in self.rotors)
        pitch = tuple(-x for x, _, _ in self.rotors)
        return (lift, roll, pitch, self.spins)


PAPER = Vehicle(
    mass=0.027,
    inertia=(3.85e-6, 3.85e-6, 5.9675e-6),
    thrust=(0.0, 0.0, 3.16e-10 * 21702.0**2),  # given per rpm^2
    torque=0.005964552,
    rise=0.15,
    fall=0.15,
)
LIBRARY = Vehicle(
    mass=0.0306,
    inertia=(9.417e-6, 9.644e-6, 1.746e-5),
    thrust=(0.00352526, 0.01437313, 0.09223048),
    torque=4.665e-3,
    rise=0.0555,
    fall=0.2494,
)
VEHICLES = {"paper": PAPER, "library": LIBRARY}
