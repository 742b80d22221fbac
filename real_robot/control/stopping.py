"""How an arm stops, yields, is released and is reset: what the control loop does in every mode.

A stop is latched: the set-point comes to rest and then moves to the measured pose. Only a reset
ends it, and the arm continues from where it is.

Yielding: an arm that was stopped in contact presses with the stiffness of its own controller times
the way from its set-point to its measured pose. The set-point that presses on nothing is the
measured pose plus `droop`: how far gravity holds the arm below its set-point (zero where gravity is
compensated).

    after a latched stop    follow that pose while the arm still moves, for at most `FOLLOW` s
    at rest                 the set-point stays; where it is away from that pose by more than
                            `band`, it goes there, at most `TIMES` times, `SETTLE` s apart

The set-point changes its aim at most TIMES + 1 times, and each aim is a pose that was measured: an
arm that hangs in the air stays there, noise does not add up, and an unknown load makes
it sink by a bounded way. What moves the set-point are the hard limits of position, velocity,
acceleration and jerk. Workspace and geometry hold it back until it first comes to rest, then no
more. A measurement that is not finite is not used, and one that repeats itself changes nothing:
then the last good pose is the aim.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from embodied.real_robot.control.arm_state import ArmState, Floats, Limits
from embodied.real_robot.control.chunk_follower import ChunkFollower
from embodied.real_robot.control.guarded_loop import GuardedLoop
from embodied.real_robot.drivers.driver import Driver, DriverError, droop_of
from embodied.real_robot.drivers.springs import springs_of
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.ipc.messages import Mode
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.safety.chain import Chain

FOLLOW = 0.5  # s for which the arm is followed after a stop, at most
SETTLE = 0.15  # s: an arm on its springs rests a little later than its set-point
TIMES = 3  # aims at rest
BAND = 0.01  # share of limits.tracking: distance of an arm that presses on nothing
TRUST = 0.5  # share of `droop` that is an error: a model of gravity is not exact
REST = 0.3  # s: an arm that would need longer to move by `band` is at rest
LONGEST = 1.0  # s that a set-point at rest waits for the arm to rest as well
SAMPLES = 4  # measurements that an aim is the mean of


class Yielding:
    """Call `see` with every measurement, `begin` when the arm was stopped, then the object for the
    aim."""

    def __init__(self, limits: Limits, droop: Callable[[Floats], Floats]) -> None:
        self.droop = droop
        self.band = BAND * np.asarray(limits.tracking)
        self.rest_velocity = self.band / REST
        self.aim = np.zeros(len(limits))
        self._poses = np.zeros((SAMPLES, len(limits)))
        self._newest = 0
        self._aims_left = 0
        self._velocity = np.zeros(len(limits))
        self._following = False
        self._measured = False
        self._follow_until = self._next_check = 0.0

    def see(self, arm: ArmState) -> None:
        """Note a measurement, in any mode; one that is not finite is ignored."""
        if not np.isfinite(arm.q).all():
            return
        if not self._measured:
            self._poses[:] = arm.q
        self._measured = True
        self._newest = (self._newest + 1) % SAMPLES
        self._poses[self._newest] = arm.q
        np.copyto(self._velocity, arm.dq)

    def begin(self, q: Floats, now: float, moving: bool) -> None:
        """Begin with the set-point at `q` [n]. `moving`: it was stopped just now, by a fault."""
        np.copyto(self.aim, q)
        self._following = moving
        self._follow_until = now + FOLLOW
        self._aims_left = TIMES
        self._next_check = now

    def wait(self, now: float) -> None:
        """Wait for the arm, because the set-point came to rest just now."""
        self._next_check = now + SETTLE

    @property
    def pose(self) -> Floats:
        """Pose [n] of the newest measurement."""
        return self._poses[self._newest]

    @property
    def settled(self) -> bool:
        """Whether the arm is no longer followed."""
        return not self._following

    def __call__(self, q: Floats, resting: bool, now: float) -> Floats:
        """The aim [n] of a set-point that is at `q` [n], `resting` or not."""
        if self._following:
            self._follow(q, now)
        elif not resting:
            self._next_check = max(self._next_check, now + SETTLE)
        elif (
            self._aims_left
            and now >= self._next_check
            and (self._arm_rests or now >= self._next_check + LONGEST)
        ):
            self._check(q)
            self._next_check = now + SETTLE
        return self.aim

    @property
    def _arm_rests(self) -> bool:
        """Whether the measured velocities are near 0."""
        return bool((np.abs(self._velocity) <= self.rest_velocity).all())

    def _follow(self, q: Floats, now: float) -> None:
        """Aim at the arm, until it rests there or the time is over."""
        self._aim_at(self.pose)
        there = bool((np.abs(self.aim - q) <= self.band).all())
        if now >= self._follow_until or (there and self._arm_rests):
            self._following = False
            self._next_check = now + SETTLE
            self._aim_at(self._poses.mean(0))

    def _check(self, q: Floats) -> None:
        """Aim anew where the set-point `q` [n] is away from the arm."""
        pose = self._poses.mean(0)
        droop = self.droop(pose)
        stretch = np.abs(q - pose - droop)
        if not (stretch <= self.band + TRUST * np.abs(droop)).all():
            self._aims_left -= 1
            np.add(pose, droop, out=self.aim)

    def _aim_at(self, pose: Floats) -> None:
        """Aim at the set-point that presses on nothing at `pose` [n]."""
        np.add(pose, self.droop(pose), out=self.aim)


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
