"""Emulation of the script that ur_rtde uploads, for the commands that our driver uses.

    input integer 0    the command       output integer 0    1: ready for one, 2: done with it
    input doubles 0..  its numbers       (or all of them 24 further up)

A command that goes on (servoj) is read at every tick and leaves the script ready. Any other is done
once, and the script is ready again when the command has gone back to 0.
"""

from __future__ import annotations

import re
import time

from embodied.real_robot.emulators.ur.programs import STILL, Registers, UrJoints

NOTHING, SERVOJ, SERVO_STOP, SET_WATCHDOG, END = 0, 11, 16, 35, 255
FREEDRIVE, END_FREEDRIVE = 52, 53
READY, DONE = 1, 2


class ControlScript:
    """As it comes from ur_rtde 1.6.5. Its watchdog is the controller's: it ends the program when
    the command's register was not written for so long, whatever was written."""

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
        self._move(joints)
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

    def _move(self, joints: UrJoints) -> None:
        if self._target:
            joints.follow(self._target, self._lookahead)
        else:
            joints.turn(STILL, self.brake)

    def _say(self, what: int, registers: Registers) -> None:
        registers.values[f"output_int_register_{self._first}"] = what
