"""How an arm stops, yields, is released and is reset: the part of the control loop that is the same
in every mode.

A stop is latched. The set-point comes to rest and then gives way to the measured pose; only a reset
leads on, from where the arm is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from embodied.real_robot.control.arm_state import ArmState, Floats
from embodied.real_robot.control.chunk_follower import ChunkFollower
from embodied.real_robot.control.guarded_loop import GuardedLoop
from embodied.real_robot.control.yielding import Yielding
from embodied.real_robot.drivers.driver import Driver, DriverError
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.ipc.messages import Mode
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.safety.chain import Chain


class StoppingLoop(GuardedLoop):
    """A guarded loop that knows how to stop for good, and how to lead on from there."""

    def __init__(
        self,
        driver: Driver,
        chain: Chain,
        follower: ChunkFollower,
        channels: Channels,
        clock: Callable[[], float] = time.monotonic,
        ring: BlackBox | None = None,
    ) -> None:
        super().__init__(driver, chain, channels, clock, ring)
        self.follower = follower
        self.yielding = Yielding(chain.limiter.limits, driver.droop)
        self._sensed = np.zeros(len(driver.sensed))
        self._lost = self._departing = self._released = False

    def connect(self) -> None:
        """Open the wire; the arm stays where it is. DriverError."""
        self.driver.connect()
        self.driver.check(self.chain.limiter.limits)
        self.chain.check(self.driver.springs)
        self.arm = self.driver.read()
        self._begin_at_rest(self.arm, self.arm.q)
        self.mode = Mode.IDLE

    def _measure(self) -> None:
        if self.mode == Mode.DISCONNECTED:
            return
        try:
            self.arm = self.driver.read()
            self._sensed = self.driver.sense()
            self.yielding.see(self.arm)
        except DriverError as error:
            self._connection_lost(error)

    def _begin_at_rest(self, arm: ArmState, q: Floats) -> None:
        """From rest, with the set-point at `q`."""
        self.chain.begin(replace(arm, q=q))
        self._rest(arm, self.clock())

    def _rest(self, arm: ArmState, now: float) -> None:
        """The set-point stays, and lets go of what the arm presses on; nothing else moves it."""
        q = self.chain.limiter.q.copy()
        self.enabled.on, self._departing, self.width = False, False, self.driver.width
        self.chain.forget(replace(arm, q=q))
        self.follower.begin(q, self.width, now)
        self.yielding.begin(q, now, moving=False)

    @property
    def _let_go(self) -> bool:
        """Whether the set-point rests where the arm presses on nothing any more."""
        return self.chain.resting and self.yielding.settled

    def _release(self, supported: bool) -> bool:
        """Make the arm compliant; False where it would fall, or cannot be released."""
        if self.broken or (self.driver.falls_when_released and not supported):
            return False
        try:
            self.driver.release()
        except DriverError:
            return False
        self.chain.clear()
        self.fault, self.mode, self._released = "", Mode.RELEASED, True
        return True

    def _engage(self) -> None:
        """Hold a released arm again, where it is."""
        try:
            self._hold_released()
        except DriverError as error:
            self._connection_lost(error)
        self.chain.limiter.begin(self.yielding.pose + self.driver.droop(self.yielding.pose))

    def _hold_released(self) -> None:
        """DriverError; then a reset tries it again."""
        if self._released:
            self._lost = True
            self.driver.engage()
            self._released = False

    def _reset(self) -> None:
        try:
            self.driver.recover()
            self._hold_released()
            self.arm = self.driver.read()
        except DriverError as error:
            self._connection_lost(error)
            return
        self.chain.clear()
        self.follower.forget()  # it may have been said on another clock
        stopped = self._lost or (self.broken and self.last_resort.stopped)
        self.fault, self.mode, self.broken = "", Mode.IDLE, False
        if stopped:  # it was connected anew or stopped by itself, and stands where it is
            self._begin_at_rest(self.arm, self.arm.q + self.driver.droop(self.arm.q))
        else:
            self._rest(self.arm, self.clock())
        self._lost = False

    def _stop_for_good(self, reason: str) -> None:
        """Latched: the arm comes to rest and yields from now on, and only `reset` leads on."""
        self.chain.fault = self.chain.fault or reason
        self.fault = self.fault or reason
        self.enabled.on = self._departing = False
        mode = self.mode
        if mode not in (Mode.DISCONNECTED, Mode.ESTOP):
            self.mode = Mode.ESTOP
            if mode == Mode.RELEASED:
                self._engage()
            self.yielding.begin(self.chain.limiter.q, self.clock(), moving=mode != Mode.RELEASED)

    def _connection_lost(self, error: DriverError) -> None:
        """Latched. What the wire still takes is sent on; else the robot's own watchdog acts."""
        if error.measured is not None:
            self.arm = error.measured
            self.yielding.see(error.measured)
        self._lost = True
        self._stop_for_good(str(error))
        self.mode = Mode.ESTOP
