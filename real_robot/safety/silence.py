"""Stages that let an arm move only while beats are heard: of the daemon, and of hold-to-run."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from embodied.real_robot.control.arm_state import ArmState
from embodied.real_robot.safety.chain import Tick
from embodied.real_robot.safety.checks import Heartbeat

LET_GO = 0.25  # s without a beat of the operator's hand


class Silence:
    """How long a sender of beats has been silent, by the listener's clock: a beat is a new
    `count`. What the sender says of its own clock only makes a beat older, never newer."""

    def __init__(self) -> None:
        self.count = 0
        self.heard = -np.inf
        """Time (s, the listener's clock) of the newest beat."""

    def hear(self, count: int, sent: float, now: float) -> None:
        """Note the newest message, which says that it was sent at `sent` (s). One whose time is not
        finite counts as never sent."""
        if count != self.count:
            self.count = count
            self.heard = min(sent, now) if np.isfinite(sent) else -np.inf

    def __call__(self, now: float) -> float:
        """Time (s) since the newest beat; infinite where none was ever heard."""
        return now - self.heard


class DaemonAlive:
    """While the stage is `watched` and the daemon is silent, the arm comes to rest and waits; a
    daemon that stays silent is a fault. Without the daemon no operator can stop the arm."""

    name: ClassVar[str] = "heartbeat"

    def __init__(self, config: Heartbeat) -> None:
        self.config = config
        self.silence = Silence()
        self.watched = False

    def begin(self, arm: ArmState) -> None:
        """The newest beat is still the newest."""

    def speaks(self, now: float) -> bool:
        """Whether the newest beat is young enough at `now` (s)."""
        return self.silence(now) <= self.config.hold  # false also where it is no number

    def __call__(self, tick: Tick) -> None:
        if not self.watched:
            return
        silence = self.silence(tick.now)
        tick.hold = tick.hold or not silence <= self.config.hold
        if not silence <= self.config.stop:
            tick.fail(f"the daemon has not answered for {silence:.1f} s")


class HoldToRun:
    """While no operator holds a key, button or pedal, the arm comes to rest, in every mode. That is
    no fault."""

    name: ClassVar[str] = "hold_to_run"

    def __init__(self) -> None:
        self.silence = Silence()

    def begin(self, arm: ArmState) -> None:
        """The newest beat is still the newest."""

    def held(self, now: float) -> bool:
        """Whether the newest beat is young enough at `now` (s)."""
        return self.silence(now) <= LET_GO  # false also where it is no number

    def __call__(self, tick: Tick) -> None:
        tick.hold = tick.hold or not self.held(tick.now)
