"""How an arm stops, yields, is released and is reset: what the control loop does in every mode.

A stop is latched: the set-point comes to rest and then moves to the measured pose. Only a reset
ends it, and the arm continues from where it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from embodied.real_robot.control.arm_state import ArmState, Floats
from embodied.real_robot.control.chunk_follower import ChunkFollower
from embodied.real_robot.control.guarded_loop import GuardedLoop
from embodied.real_robot.control.yielding import Yielding
from embodied.real_robot.drivers.driver import Driver, DriverError, droop_of
from embodied.real_robot.drivers.springs import springs_of
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.ipc.messages import Mode
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.safety.chain import Chain


class StoppingLoop(GuardedLoop):
    """A guarded loop that can stop for good, and be reset."""

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
        self.droop = droop_of(driver)
        self.yielding = Yielding(chain.limiter.limits, self.droop)
        self._sensed = np.zeros(len(driver.sensed))
        self._connection_failed = False
        """Whether the wire failed since the last reset."""
        self._home_pending = False
        """Whether the way home begins as soon as the set-point has yielded."""
        self._compliant = False
        """Whether the driver was told to release the arm and not yet to hold it again."""

    def connect(self) -> None:
        """Open the wire and hold the arm where it is. DriverError."""
        self.driver.connect()
        self.driver.check(self.chain.limiter.limits)
        self.chain.check(springs_of(self.driver))
        self.arm = self.driver.read()
        self._begin_at_rest(self.arm, self.arm.q)
        self.mode = Mode.IDLE

    def _measure(self) -> None:
        """Read the driver; an error of the wire is latched."""
        if self.mode == Mode.DISCONNECTED:
            return
        try:
            self.arm = self.driver.read()
            self._sensed = self.driver.sense()
            self.yielding.see(self.arm)
        except DriverError as error:
            self._connection_lost(error)

    def _begin_at_rest(self, arm: ArmState, q: Floats) -> None:
        """Begin from rest, with the set-point at `q` [n]."""
        self.chain.begin(replace(arm, q=q))
        self._rest(arm, self.clock())

    def _rest(self, arm: ArmState, now: float) -> None:
        """Hold the set-point; it only yields where the arm presses on something."""
        q = self.chain.limiter.q.copy()
        self.enabled.on = False
        self._home_pending = False
        self.width = self.driver.width
        self.chain.forget(replace(arm, q=q))
        self.follower.begin(q, self.width, now)
        self.yielding.begin(q, now, moving=False)

    @property
    def _yielded(self) -> bool:
        """Whether the set-point rests where the arm presses on nothing."""
        return self.chain.resting and self.yielding.settled

    def _release(self, supported: bool) -> bool:
        """Make the arm compliant; False where it would fall, or cannot be released."""
        if self.internal_error or (self.driver.falls_when_released and not supported):
            return False
        try:
            self.driver.release()
        except DriverError:
            return False
        self.chain.clear()
        self.fault = ""
        self.mode = Mode.RELEASED
        self._compliant = True
        return True

    def _engage(self) -> None:
        """Hold a released arm again, where it is."""
        try:
            self._hold_released()
        except DriverError as error:
            self._connection_lost(error)
        self.chain.limiter.begin(self.yielding.pose + self.droop(self.yielding.pose))

    def _hold_released(self) -> None:
        """Hold an arm that the driver has released. DriverError; a reset tries it again."""
        if self._compliant:
            self._connection_failed = True
            self.driver.engage()
            self._compliant = False

    def _reset(self) -> None:
        """End a latched stop, and continue from where the arm is."""
        try:
            self.driver.recover()
            self._hold_released()
            self.arm = self.driver.read()
        except DriverError as error:
            self._connection_lost(error)
            return
        self.chain.clear()
        self.follower.forget()  # it may have been said on another clock
        stopped = self._connection_failed or (self.internal_error and self.last_resort.stopped)
        self.fault = ""
        self.mode = Mode.IDLE
        self.internal_error = False
        if stopped:  # it was connected anew or stopped by itself, and stands where it is
            self._begin_at_rest(self.arm, self.arm.q + self.droop(self.arm.q))
        else:
            self._rest(self.arm, self.clock())
        self._connection_failed = False

    def _stop_for_good(self, reason: str) -> None:
        """Latch a stop: the arm comes to rest and yields, until a reset. The first reason stays."""
        self.chain.fault = self.chain.fault or reason
        self.fault = self.fault or reason
        self.enabled.on = self._home_pending = False
        mode = self.mode
        if mode not in (Mode.DISCONNECTED, Mode.ESTOP):
            self.mode = Mode.ESTOP
            if mode == Mode.RELEASED:
                self._engage()
            self.yielding.begin(self.chain.limiter.q, self.clock(), moving=mode != Mode.RELEASED)

    def _connection_lost(self, error: DriverError) -> None:
        """Latch an error of the wire. What it still takes is sent on; else the robot's own watchdog
        acts."""
        if error.measured is not None:
            self.arm = error.measured
            self.yielding.see(error.measured)
        self._connection_failed = True
        self._stop_for_good(str(error))
        self.mode = Mode.ESTOP
