"""Yielding: the set-point of a stopped arm goes to where the arm is, so that it presses on nothing.

An arm that was stopped in contact presses with the stiffness of its own controller times the way
from its set-point to its measured pose. The set-point that presses on nothing is the measured pose
plus `droop`: how far gravity holds the arm below its set-point (zero where gravity is compensated).

    after a touch           stay for `pause` s where the set-point was put (`measured.py`)
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

from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits

FOLLOW = 0.5  # s for which the arm is followed after a stop, at most
SETTLE = 0.15  # s: an arm on its springs rests a little later than its set-point
TIMES = 3  # aims at rest
BAND = 0.01  # share of limits.tracking: distance of an arm that presses on nothing
TRUST = 0.5  # share of `droop` that is an error: a model of gravity is not exact
REST = 0.3  # s: an arm that would need longer to move by `band` is at rest
LONGEST = 1.0  # s that a set-point at rest waits for the arm to rest as well
SAMPLES = 4  # measurements that an aim at rest is the mean of


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
        self._follow_from = self._follow_until = self._next_check = 0.0

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

    def begin(self, q: Floats, now: float, moving: bool, pause: float = 0.0) -> None:
        """Begin with the set-point at `q` [n], where it stays for `pause` s. `moving`: it was
        stopped just now, by a fault."""
        np.copyto(self.aim, q)
        self._following = moving
        self._follow_from = now + pause
        self._follow_until = now + pause + FOLLOW
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
            if now >= self._follow_from:
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

    @property
    def _rest_pose(self) -> Floats:
        """Pose [n] of an arm at rest, noise averaged; the newest one of an arm that was last seen
        in motion, which no older one leads back from."""
        return self._poses.mean(0) if self._arm_rests else self.pose

    def _follow(self, q: Floats, now: float) -> None:
        """Aim at the arm, until it rests there or the time is over."""
        self._aim_at(self.pose)
        there = bool((np.abs(self.aim - q) <= self.band).all())
        if now >= self._follow_until or (there and self._arm_rests):
            self._following = False
            self._next_check = now + SETTLE
            self._aim_at(self._rest_pose)

    def _check(self, q: Floats) -> None:
        """Aim anew where the set-point `q` [n] is away from the arm."""
        pose = self._rest_pose
        droop = self.droop(pose)
        stretch = np.abs(q - pose - droop)
        if not (stretch <= self.band + TRUST * np.abs(droop)).all():
            self._aims_left -= 1
            np.add(pose, droop, out=self.aim)

    def _aim_at(self, pose: Floats) -> None:
        """Aim at the set-point that presses on nothing at `pose` [n]."""
        np.add(pose, self.droop(pose), out=self.aim)
