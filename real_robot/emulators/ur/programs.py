"""Emulated joints of a UR, and our servoj program on it, which follows registers at every tick."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol


class Registers:
    """What is written and read by clients and programs, by RTDE's names: its `values`, and when (s,
    monotonic) each was last `heard` from a client."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.heard: dict[str, float] = {}

    def integer(self, which: int) -> int:
        """An input register; 0 before it is written."""
        return int(self.values.get(f"input_int_register_{which}", 0))

    def doubles(self, first: int, count: int) -> list[float]:
        """Input registers, in a row."""
        names = (f"input_double_register_{i}" for i in range(first, first + count))
        return [float(self.values.get(name, 0.0)) for name in names]


class Program(Protocol):
    """One that was sent to the arm. It stops with `brake` (rad/s^2), and is `free` (in freedrive)
    or not."""

    brake: float
    free: bool

    def tick(self, joints: UrJoints, registers: Registers) -> str:
        """Why it ends; empty while it goes on."""
        ...


class Following:
    """`embodied.real_robot.drivers.ur.program.program`: follows registers 24 to 29; integer 24
    beats, 25 is 1 for freedrive, in which a person (a test) sets `joints.q`."""

    def __init__(self, code: str, registers: Registers) -> None:
        self._most = int(re.findall(r"still > (\d+)", code)[0])
        self.lookahead, self.brake = (
            float(re.findall(rf"{word}([\d.]+)", code)[0])
            for word in ("lookahead_time=", r"stopj\(")
        )
        self._beat, self._still, self._begun = registers.integer(24), 0, False
        self._frees = "freedrive_mode()" in code and "end_freedrive_mode()" in code
        self.free = False

    def tick(self, joints: UrJoints, registers: Registers) -> str:
        beat = registers.integer(24)
        self._begun = self._begun or (beat != self._beat and beat > 0)
        self._still, self._beat = (self._still + 1 if beat == self._beat else 0), beat
        if self._begun and (beat < 0 or self._still > self._most):
            self.free = False
            return "told" if beat < 0 else "the watchdog"
        self.free = self._begun and self._frees and registers.integer(25) == 1
        if self.free:
            joints.dq = list(STILL)
        elif self._begun:
            joints.follow(registers.doubles(24, 6), self.lookahead)
        return ""


SPEED, ACCELERATION = 2.0, 40.0  # rad/s, rad/s^2
THERE = 1e-6  # rad: friction has the rest
STILL = (0.0,) * 6


class UrJoints:
    """Six simulated joints that servoj and stopj move, each a second-order system. They begin at
    rest at `q` [6] (rad); a tick is 1 / `frequency` s.

        dq' = clip((target - q) / lookahead, +-SPEED),   |dq' - dq| <= ACCELERATION dt

    stopj and a protective stop set dq' = 0 at a program's rate.
    """

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
