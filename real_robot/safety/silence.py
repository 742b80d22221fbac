"""Beats that have to be heard for an arm to move: how long a sender has been silent, and the stages
of the daemon's heartbeat and of hold-to-run."""

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
        self.count, self.heard = 0, -np.inf

    def hear(self, count: int, sent: float, now: float) -> None:
        """The newest message; `sent` (s): when that was, as it says. One whose time is no number
        was not sent now."""
        if count != self.count:
            self.count, self.heard = count, min(sent, now) if np.isfinite(sent) else -np.inf

    def __call__(self, now: float) -> float:
        """s; infinite where nothing was ever heard."""
        return now - self.heard


class DaemonAlive:
    """Without the daemon no operator can stop the arm: while it is `watched` and the daemon is
    silent, the arm comes to rest and waits; a daemon that stays silent is a fault."""

    name: ClassVar[str] = "heartbeat"

    def __init__(self, config: Heartbeat) -> None:
        self.config, self.silence, self.watched = config, Silence(), False

    def begin(self, arm: ArmState) -> None:
        """Nothing is remembered: a daemon that spoke has spoken."""

    def speaks(self, now: float) -> bool:
        """Whether the newest beat is young enough at `now` (s)."""
        return self.silence(now) <= self.config.hold  # false also where it is no number

    def __call__(self, tick: Tick) -> None:
        if not self.watched:
            return
        silence = self.silence(tick.now)
        tick.hold = tick.hold or not silence <= self.config.hold
        if not silence <= self.config.stop:
            tick.fault = tick.fault or f"the daemon has not answered for {silence:.1f} s"


class HoldToRun:
    """Without an operator's hand on its key, button or pedal the arm comes to rest, in every mode,
    until it is held again; that is no fault."""

    name: ClassVar[str] = "hold_to_run"

    def __init__(self) -> None:
        self.silence = Silence()

    def begin(self, arm: ArmState) -> None:
        """Nothing is remembered: a hand that was on it still is."""

    def held(self, now: float) -> bool:
        """Whether the newest beat is young enough at `now` (s)."""
        return self.silence(now) <= LET_GO  # false also where it is no number

    def __call__(self, tick: Tick) -> None:
        tick.hold = tick.hold or not self.held(tick.now)
