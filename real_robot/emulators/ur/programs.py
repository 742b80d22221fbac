"""Emulated joints of a UR, and our servoj program on it, which follows registers at every tick."""

from __future__ import annotations

import re
import time
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
    """`embodied.real_robot.drivers.ur.driver.program`: follows registers 24 to 29; integer 24
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


NOTHING, SERVOJ, SERVO_STOP, SET_WATCHDOG, END = 0, 11, 16, 35, 255
FREEDRIVE, END_FREEDRIVE = 52, 53
READY, DONE = 1, 2


class ControlScript:
    """The script that ur_rtde 1.6.5 uploads, for the commands that our driver uses. Its watchdog is
    the controller's: it ends the program when the command's register was not written for so long,
    whatever was written.

        input integer 0    the command       output integer 0    1: ready for one, 2: done with it
        input doubles 0..  its numbers       (or all of them 24 further up)

    A command that goes on (servoj) is read at every tick and leaves the script ready. Any other is
    done once, and the script is ready again when the command has gone back to 0.
    """

    def __init__(self, code: str, registers: Registers) -> None:
        self._first = int(re.findall(r"# int register offset\n(\d+)", code)[0])
        self.brake = 10.0
        self._target: list[float] = []
        self._lookahead = 0.1
        self._silence = 0.0  # s that the watchdog waits; 0: there is none
        self._doing = NOTHING
        self.free = False
        self._say(READY, registers)

    def tick(self, joints: UrJoints, registers: Registers) -> str:
        command = registers.integer(self._first)
        heard = registers.heard.get(f"input_int_register_{self._first}", 0.0)
        if self._silence and time.monotonic() - heard > self._silence:
            return "the watchdog"
        if command == END:
            return "told"
        if command == SERVOJ:
            numbers = registers.doubles(self._first, 11)
            self._target, self._lookahead = numbers[:6], numbers[9]
        if command in (NOTHING, SERVOJ):
            self._doing = NOTHING
            self._say(READY, registers)
        elif not self._do(command, joints, registers):
            return f"command {command}, which is not played"
        if self._target:
            joints.follow(self._target, self._lookahead)
        else:
            joints.turn(STILL, self.brake)
        return ""

    def _do(self, command: int, joints: UrJoints, registers: Registers) -> bool:
        """A command that is done once; whether it is known."""
        number = registers.doubles(self._first, 1)[0]
        if command == SERVO_STOP:
            if self._doing != command:
                self._target, self.brake = [], number
            if joints.resting:
                self._say(DONE, registers)
        elif command == SET_WATCHDOG:
            self._silence = 1 / number
            self._say(DONE, registers)
        elif command in (FREEDRIVE, END_FREEDRIVE):
            self._target, self.free = [], command == FREEDRIVE
            self._say(DONE, registers)
        else:
            return False
        self._doing = command
        return True

    def _say(self, what: int, registers: Registers) -> None:
        registers.values[f"output_int_register_{self._first}"] = what
