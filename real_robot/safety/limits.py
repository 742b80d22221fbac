"""Hard limits of position, velocity, acceleration and jerk, all at once, at all times.

Every tick computes the time-optimal motion from the commanded state to rest at the target, within
all limits (Ruckig; Berscheid and Kroeger, 2021), and takes its first step. Targets are inside the
position limits and motions end at rest, so every reachable state can be stopped inside them: no
sequence of targets, however it jumps, leaves the limits. A region that is no box of joint positions
(a workspace, an arm's own links) is kept by checking the motion to rest of every next state first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from embodied.real_robot.control.arm_state import Floats, Limits

try:
    import ruckig as package
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ruckig is not installed; type: pip install 'embodied-rl[robot]'", name="ruckig"
    ) from error

ruckig: Any = package  # it says nothing about its types
FINE = (ruckig.Result.Working, ruckig.Result.Finished)
HAIRS = (0.0, 1e-9, 1e-7, 1e-5)  # rad: by so much less of the way a step is tried

SAMPLES = 8  # of a motion to rest
BULGE = 2e-3  # m: a motion to rest may lead out by so much, between two samples
ROUNDING = 2e-8  # rad: the planner meets positions to 1e-8, and that is not to lead out either


class Limiter:
    """Its own commanded state is what it continues: `q` [n] was sent last. `wanted` [n] is room for
    the next target.

    Each of `guards` gives how far inside of what is allowed each of k positions `q` [k, n] is [k]
    (m; negative: outside). A step is taken only where the motion to rest that could follow it stays
    inside of all; otherwise the arm brakes, along the motion that was looked at a tick before.
    """

    def __init__(
        self, limits: Limits, dt: float, guards: Sequence[Callable[[Floats], Floats]] = ()
    ) -> None:
        self.limits, self.dt, self.guards = limits, dt, guards
        n = len(limits)
        margin = np.asarray(limits.margin) + ROUNDING
        self.low, self.high = np.asarray(limits.low) + margin, np.asarray(limits.high) - margin
        self.wanted, self.q = np.zeros(n), np.zeros(n)
        self._plan: Any = ruckig.Ruckig(n, dt)
        self._state: Any = ruckig.InputParameter(n)
        self._next: Any = ruckig.OutputParameter(n)
        self._stop: Any = ruckig.Trajectory(n)
        self._path = np.zeros((SAMPLES + 1, n))
        self._best: dict[int, float] = {}
        self._rested, self._guarded, self._halting = True, False, False
        self._state.synchronization = ruckig.Synchronization.No
        self._state.max_velocity = list(limits.velocity)
        self._state.max_acceleration = list(limits.acceleration)
        self._state.max_jerk = list(limits.jerk)
        self._still = [0.0] * n
        self.begin(np.clip(self.q, self.low, self.high))

    def begin(self, q: Floats) -> None:
        """From rest at `q` [n]. One that is outside the limits is led back in."""
        np.copyto(self.q, q)
        self._set(self.q.tolist(), self._still, self._still)
        self.resting = True

    def __call__(self, target: Floats) -> Floats:
        """One tick towards `target` [n], clipped into the position limits; what to send [n]."""
        np.clip(target, self.low, self.high, out=self.wanted)
        self._guarded, self._halting = bool(self.guards), False
        return self.q if self._advance() else self.brake()

    def unguarded(self, target: Floats) -> Floats:
        """The same without guards from the next rest on: a stopped arm may yield to where it was
        measured. Until then they hold it, and where they do, it brakes to rest before it yields."""
        np.copyto(self.wanted, target)
        if self._arrived():  # also outside of the limits, where a person may have led it
            return self.q
        np.clip(target, self.low, self.high, out=self.wanted)
        if self._arrived():
            return self.q
        self._guarded = self._guarded and not self.resting
        self._halting = self._halting and self._guarded
        if self._halting or not self._advance():
            self._halting = self._guarded
            return self.brake()
        return self.q

    def _advance(self) -> bool:
        """One tick towards `wanted`, if the planner knows one and the guards allow it."""
        state = self._state
        before = (state.current_position, state.current_velocity, state.current_acceleration)
        self._rested = self.resting
        if not any(self._follow(hair) for hair in HAIRS):
            return False
        if self._guarded and self._leaves(before[0]):
            self._set(*before)
            return False
        self.q[:] = self._next.new_position
        return True

    def _arrived(self) -> bool:
        return self.resting and bool((np.abs(self.wanted - self.q) <= ROUNDING).all())

    def brake(self) -> Floats:
        """One tick towards rest, as fast as the limits allow; what to send [n]."""
        self._state.control_interface = ruckig.ControlInterface.Velocity
        if not self._step():  # its own commanded state is always valid: this is a bug, not a wish
            raise RuntimeError("the motion planner failed")
        self.q[:] = self._next.new_position
        return self.q

    def _follow(self, hair: float) -> bool:
        """Step towards `wanted`, or to `hair` before it: the planner fails where two kinds of
        motion meet to the last bit (from rest over 2 a^3 / j^2), and a hair away it does not."""
        state = self._state
        state.control_interface = ruckig.ControlInterface.Position
        target = self.wanted
        if hair:
            target = target - hair * np.sign(target - np.asarray(state.current_position))
        state.target_position = target.tolist()
        return self._step()

    def _step(self) -> bool:
        """Whether the planner knew how; if not, nothing has changed."""
        self._state.target_velocity = self._still
        self._state.target_acceleration = self._still
        try:
            result = self._plan.update(self._state, self._next)
        except ruckig.RuckigError:
            return False
        if result not in FINE:
            return False
        self._next.pass_to_input(self._state)
        self.resting = bool(result == ruckig.Result.Finished)
        return True

    def _leaves(self, now: list[float]) -> bool:
        """Whether the motion to rest from the state just reached leaves what is allowed, or leads
        further out from where the arm is, if that is outside. What was gained is not given back, so
        that many small bulges do not add up."""
        self._state.control_interface = ruckig.ControlInterface.Velocity
        try:
            if self._plan.calculate(self._state, self._stop) not in FINE:
                return True
        except ruckig.RuckigError:
            return True
        duration = float(self._stop.duration)
        self._path[0] = now
        for k in range(SAMPLES):
            self._path[k + 1] = self._stop.at_time(duration * k / (SAMPLES - 1))[0]
        return any([self._leads_out(i, guard(self._path)) for i, guard in enumerate(self.guards)])

    def _leads_out(self, i: int, depths: Floats) -> bool:
        """Of the depths of now and of the motion to rest; `_best` is what was reached so far."""
        inside = np.minimum(depths, 0.0)
        best = max(self._best.get(i, -np.inf), float(inside[0]))
        if self._rested and inside[0] < best - BULGE:  # something else moved it: begin from there
            best = float(inside[0])
        self._best[i] = best
        np.maximum.accumulate(inside, out=inside)
        least = np.maximum(np.maximum(inside, best) - BULGE, inside[0]) - 1e-9
        return bool((depths < least).any())

    def _set(self, q: list[float], dq: list[float], ddq: list[float]) -> None:
        self._state.current_position = q
        self._state.current_velocity = dq
        self._state.current_acceleration = ddq
