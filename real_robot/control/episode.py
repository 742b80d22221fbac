"""Time limit of an episode, and why the newest one ended."""

from __future__ import annotations

import math

from embodied.real_robot.ipc.messages import Ended, Mode


class Episode:
    """An episode runs from START until the arm leaves RUNNING. The control process keeps its time
    limit itself: a terminal or a daemon that hangs must not make it longer."""

    def __init__(self) -> None:
        self.ended = Ended.NOTHING
        self._until = math.inf
        self._runs = False

    @staticmethod
    def possible(seconds: float) -> bool:
        """Whether `seconds` can be a time limit (0: none)."""
        return 0 <= seconds < math.inf

    def begin(self, seconds: float, now: float) -> None:
        """Begin an episode at `now` (s) that lasts at most `seconds` (0: no limit)."""
        self.ended = Ended.NOTHING
        self._until = now + seconds if seconds else math.inf
        self._runs = True

    def over(self, now: float) -> bool:
        """Whether it has run for as long as it may; `ended` then says so."""
        if not self._runs or now < self._until:
            return False
        self._runs = False
        self.ended = Ended.TIME
        return True

    def watch(self, mode: Mode) -> None:
        """Note the mode after a tick: an episode that left RUNNING before its time was stopped."""
        if self._runs and mode != Mode.RUNNING:
            self._runs = False
            self.ended = Ended.FAULT if mode == Mode.ESTOP else Ended.STOPPED
