"""The Franka hand, which takes one command at a time, made to follow a changing target width.

A target that leaves the measured width starts a motion to the end of that direction. Closing is a
grasp with force, so that a held object stays held. A hand that reaches its target before the end is
stopped there. Commands take up to a second and run in threads of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.drivers.franka.errors import FAILED, call, explain, franky

BAND = 0.004  # m off the wish that set the hand in motion
LATENCY = 0.03  # s that a stop needs
PAUSE = 0.02  # s between two looks
OPEN = "open"
CLOSE = "close"
STILL = "still"


@dataclass(frozen=True)
class Config:
    """Settings of a Franka's hand."""

    speed: Annotated[float, Bound(above=0.0, high=0.2)]  # m/s of its opening
    force: Annotated[float, Bound(above=0.0, high=140.0)]  # N to hold things with; 70 continuously

    def __post_init__(self) -> None:
        if not (0 < self.speed <= 0.2 and 0 < self.force <= 140):
            raise ConfigError("hand: speed is up to 0.2 m/s, force (continuous: 70) up to 140 N")


class Hand:
    """`wish` (m) may be set at any time; `width` (m) is what was measured last; `fault` says what
    failed, empty while nothing did."""

    def __init__(self, config: Config, host: str, patience: float) -> None:
        self.config = config
        self.host = host
        self._gripper: Any = call(host, lambda: franky.Gripper(host), patience, "find its hand")
        state = call(host, lambda: self._gripper.state, patience, "tell its hand's width")
        self.most: float = state.max_width
        if self.most < 2 * BAND:
            raise DriverError(f"the hand of the Franka at {host} says it cannot open: home it")
        self.width = self.wish = float(state.width)
        self.fault = ""
        self._going = STILL
        self._number = 0
        self._busy = False
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """No more commands; the hand keeps what it holds."""
        self._end.set()
        self._watcher.join(1.5)  # a look at a hand that is gone ends after a second

    def _watch(self) -> None:
        try:
            while not self._end.wait(PAUSE):
                self.width = float(self._gripper.state.width)
                self._follow(min(max(self.wish, 0.0), self.most) - self.width)
        except FAILED as error:
            self._failed(error)

    def _follow(self, off: float) -> None:
        """`off` (m): how much wider it is wanted."""
        lead = self.config.speed * LATENCY
        if off < -BAND and self._going != CLOSE:
            self._go(CLOSE, lambda: self._grasp())
        elif off > BAND and self._going != OPEN:
            self._go(OPEN, lambda: self._gripper.move(self.most, self.config.speed))
        elif self._busy and self._before_end() and (off if self._going == OPEN else -off) <= lead:
            self._halt()

    def _before_end(self) -> bool:
        return BAND < self.wish < self.most - BAND

    def _grasp(self) -> bool:
        """Close until something is between the pads, or nothing: both are fine."""
        config, most = self.config, self.most
        return bool(self._gripper.grasp(0.0, config.speed, config.force, most, most))

    def _go(self, way: str, do: Callable[[], bool]) -> None:
        if self._busy:
            self._halt()
        self._going = way
        self._busy = True
        self._number = self._number + 1
        threading.Thread(target=self._run, args=(do, self._number), daemon=True).start()

    def _run(self, do: Callable[[], bool], number: int) -> None:
        try:
            do()
        except FAILED as error:
            if number == self._number and not self._end.is_set():
                self._failed(error)
        if number == self._number:
            self._busy = False

    def _halt(self) -> None:
        """End the motion that runs; its later answers are ignored."""
        self._number += 1
        self._going = STILL
        self._busy = False
        self._gripper.stop()

    def _failed(self, error: BaseException) -> None:
        self.fault = explain(self.host, f"hand: {error}")
