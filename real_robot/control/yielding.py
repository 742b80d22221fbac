"""Yielding: the set-point of a stopped arm goes to where the arm is, so that it presses on nothing.

An arm that was stopped in contact presses with the stiffness of its own controller times the way
from its set-point to its measured pose. The set-point that presses on nothing is the measured pose
plus `droop`: how far gravity holds the arm below its set-point (zero where gravity is compensated).

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

from collections.abc import Callable

import numpy as np

from embodied.real_robot.control.arm_state import ArmState, Floats, Limits

FOLLOW = 0.5  # s
SETTLE = 0.15  # s: an arm on its springs is at rest a little after its set-point
TIMES = 3
BAND = 0.01  # of limits.tracking
TRUST = 0.5  # of what `droop` says: a model of gravity is not exact
REST = 0.3  # s: an arm that would need longer to go by `band` is at rest
LONGEST = 1.0  # s that a set-point at rest waits for the arm to rest as well
SAMPLES = 4  # measurements that an aim is the mean of


class Yielding:
    """`see` every measurement; `begin` when the arm was stopped, then call for the aim."""

    def __init__(self, limits: Limits, droop: Callable[[Floats], Floats]) -> None:
        self.droop = droop
        self.band = BAND * np.asarray(limits.tracking)
        self.slow = self.band / REST
        self.aim = np.zeros(len(limits))
        self._poses = np.zeros((SAMPLES, len(limits)))
        self._at = self._left = 0
        self._speed = np.zeros(len(limits))
        self._following, self._seen = False, False
        self._until = self._look = 0.0

    def see(self, arm: ArmState) -> None:
        """A measurement of any tick, in any mode."""
        if not np.isfinite(arm.q).all():
            return
        if not self._seen:
            self._poses[:] = arm.q
        self._seen, self._at = True, (self._at + 1) % SAMPLES
        self._poses[self._at] = arm.q
        np.copyto(self._speed, arm.dq)

    def begin(self, q: Floats, now: float, moving: bool) -> None:
        """The set-point is at `q` [n]. `moving`: it was stopped just now, by a fault."""
        np.copyto(self.aim, q)
        self._following, self._until = moving, now + FOLLOW
        self._left, self._look = TIMES, now

    def wait(self, now: float) -> None:
        """The set-point came to rest just now; the arm does so a little later."""
        self._look = now + SETTLE

    @property
    def pose(self) -> Floats:
        """Where the arm was measured last [n]."""
        return self._poses[self._at]

    @property
    def settled(self) -> bool:
        """Whether the arm is no longer followed."""
        return not self._following

    def __call__(self, q: Floats, resting: bool, now: float) -> Floats:
        """Where the set-point, which is at `q` [n] and `resting` or not, should go [n]."""
        if self._following:
            self._follow(q, now)
        elif not resting:
            self._look = max(self._look, now + SETTLE)
        elif self._left and now >= self._look and (self._still or now >= self._look + LONGEST):
            self._check(q)
            self._look = now + SETTLE
        return self.aim

    @property
    def _still(self) -> bool:
        return bool((np.abs(self._speed) <= self.slow).all())

    def _follow(self, q: Floats, now: float) -> None:
        self._aim_at(self.pose)
        there = bool((np.abs(self.aim - q) <= self.band).all())
        if now >= self._until or (there and self._still):
            self._following, self._look = False, now + SETTLE
            self._aim_at(self._poses.mean(0))

    def _check(self, q: Floats) -> None:
        """Another aim, where the set-point is away from the arm."""
        pose = self._poses.mean(0)
        droop = self.droop(pose)
        stretch = np.abs(q - pose - droop)
        if not (stretch <= self.band + TRUST * np.abs(droop)).all():
            self._left -= 1
            np.add(pose, droop, out=self.aim)

    def _aim_at(self, pose: Floats) -> None:
        np.add(pose, self.droop(pose), out=self.aim)
