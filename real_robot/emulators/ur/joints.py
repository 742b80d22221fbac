"""Six simulated joints that servoj and stopj move, each a second-order system.

    dq' = clip((target - q) / lookahead, +-SPEED),   |dq' - dq| <= ACCELERATION dt

stopj and a protective stop set dq' = 0 at a program's rate.
"""

from __future__ import annotations

from collections.abc import Sequence

SPEED, ACCELERATION = 2.0, 40.0  # rad/s, rad/s^2
THERE = 1e-6  # rad: friction has the rest
STILL = (0.0,) * 6


class UrJoints:
    """At rest at `q` [6] (rad); a tick is 1 / `frequency` s."""

    def __init__(self, frequency: float, q: Sequence[float]) -> None:
        self.frequency = frequency
        self.q, self.dq = list(q), list(STILL)

    def follow(self, target: Sequence[float], lookahead: float) -> None:
        """servoj to `target` [6] (rad) for a tick."""
        way = [b - a for a, b in zip(self.q, target, strict=True)]
        self.turn([min(max(w / lookahead, -SPEED), SPEED) for w in way], ACCELERATION)
        for i, to in enumerate(target):
            if abs(to - self.q[i]) < THERE and abs(self.dq[i]) < THERE * self.frequency:
                self.q[i], self.dq[i] = to, 0.0

    def turn(self, speeds: Sequence[float], acceleration: float) -> None:
        """On their way to `speeds` [6] (rad/s) at `acceleration` (rad/s^2), for a tick."""
        most = acceleration / self.frequency
        self.dq = [a + min(max(b - a, -most), most) for a, b in zip(self.dq, speeds, strict=True)]
        self.q = [q + dq / self.frequency for q, dq in zip(self.q, self.dq, strict=True)]

    @property
    def resting(self) -> bool:
        return not any(self.dq)
