"""Limiter: a joint target that moves towards what is wanted within the limits of the joints, of the
tool's speed and of the regions, and can always come to rest inside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from embodied.real_robot.kernel.arm_state import Floats, Limits

try:
    import ruckig as package
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ruckig is not installed; type: pip install 'embodied-rl[robot]'", name="ruckig"
    ) from error

ruckig: Any = package  # the package has no types
SOLVED = (ruckig.Result.Working, ruckig.Result.Finished)
NO_MOTION = (ruckig.RuckigError, ValueError)
"""What the planner raises. ValueError: a result that its binding has no name for, such as that of a
motion of more than 7,600 s."""
OFFSETS = (0.0, 1e-9, 1e-7, 1e-5)
"""Distances (rad, m) before a target at which a plan is tried, one after the other."""
SAMPLES = 8
"""Samples of a motion to rest at which the guards are asked."""
FINER = 3
"""Steps from one of them to the next, at which the tool's speed is looked at."""
BULGE = 2e-3
"""Distance (m) by which a motion to rest may lead out between two samples."""
ROUNDING = 2e-8
"""Distance (rad, m) inside the limits for the planner's rounding, which is 1e-8."""
INSTANT = 1e-4
"""Time (s) over which the tool's speed is a difference of places."""
BETWEEN = 0.95
"""Share of the tool's speed limit that samples keep, since the tool may be faster between two."""
SLOWER = 3
"""Plans that are tried, each slower than the one before, until the tool is slow enough."""


class Limiter:
    """Hard limits of position, velocity, acceleration and jerk, all at once, at all times.

    Every tick computes the time-optimal motion from the commanded state to rest at the target,
    within all limits (Ruckig; Berscheid and Kroeger, 2021), and takes its first step. Targets are
    inside the position limits and motions end at rest, so every reachable state can be stopped
    inside them: no sequence of targets, however it jumps, leaves the limits. A region that is no
    box of joint positions (a workspace, an arm's own links) is kept by checking the motion to rest
    of every next state first. The limiter continues its own commanded motion, of which `q` [n] was
    sent last.

    Each of `guards` gives the depths [k] (m; negative: outside) of positions [k, n] inside a
    region. A step is taken only where the motion to rest that could follow it stays inside of all
    regions; otherwise the arm brakes, along the motion that was checked a tick before. So it is
    with the tool's speed: `forward` gives its places [k, 3] (m) at positions [k, n], and neither a
    step nor the motion to rest after it is faster than `tool_speed` (m/s); a faster plan is made
    slower first.
    """

    def __init__(
        self,
        limits: Limits,
        dt: float,
        guards: Sequence[Callable[[Floats], Floats]] = (),
        forward: Callable[[Floats], Floats] | None = None,
        tool_speed: float = np.inf,
    ) -> None:
        self.limits = limits
        self.dt = dt
        self.guards = guards
        self.forward = forward
        self.tool_speed = BETWEEN * tool_speed
        n = len(limits)
        margin = np.asarray(limits.margin) + ROUNDING
        self.low = np.asarray(limits.low) + margin
        self.high = np.asarray(limits.high) - margin
        self.wanted = np.zeros(n)
        """Room [n] for the next target."""
        self.q = np.zeros(n)
        """Joint target [n] that was sent last."""
        self._planner: Any = ruckig.Ruckig(n, dt)
        self._state: Any = ruckig.InputParameter(n)
        self._next: Any = ruckig.OutputParameter(n)
        self._stop: Any = ruckig.Trajectory(n)
        self._path = np.zeros((SAMPLES + 1, n))
        """The present target, then samples of the motion to rest."""
        self._rest = np.zeros((FINER * (SAMPLES - 1) + 1, n))
        """Finer samples of the motion to rest."""
        self._speeds = np.zeros_like(self._rest)
        """Joint velocities at the finer samples."""
        self._best_depths: dict[int, float] = {}
        """Depth (m, at most 0) that was reached so far in each guard's region."""
        self._rested_before = True
        """Whether the motion was at rest before this tick."""
        self._guarded = False
        """Whether the guards hold the motion of this tick."""
        self._halting = False
        """Whether the guards refused a motion of `unguarded`, which comes to rest first."""
        self.slowed = False
        """Whether the limit of the tool's speed made the newest motion towards a target slower."""
        self._state.synchronization = ruckig.Synchronization.No
        self._velocity = list(limits.velocity)
        self._state.max_velocity = self._velocity
        self._state.max_acceleration = list(limits.acceleration)
        self._state.max_jerk = list(limits.jerk)
        self._zeros = [0.0] * n
        self.begin(np.clip(self.q, self.low, self.high))

    def begin(self, q: Floats) -> None:
        """Begin from rest at `q` [n]. A `q` outside the limits is led back in."""
        np.copyto(self.q, q)
        self._set_state(self.q.tolist(), self._zeros, self._zeros)
        self.resting = True

    def __call__(self, target: Floats) -> Floats:
        """Move one tick towards `target` [n], clipped into the position limits; returns the joint
        target [n] to send."""
        np.clip(target, self.low, self.high, out=self.wanted)
        self._guarded = bool(self.guards)
        self._halting = False
        if self._advance():
            return self.q
        slowed = self.slowed
        self.brake()
        self.slowed = slowed
        return self.q

    def unguarded(self, target: Floats) -> Floats:
        """Move like `__call__`, but from the next rest on without guards.

        A stopped arm may yield to where it was measured. Until the motion rests the guards hold it,
        and a motion that they refuse brakes to rest before it yields."""
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
        """Move one tick towards `wanted`; False where the planner finds no motion, a guard refuses
        it, or the tool would be too fast."""
        state = self._state
        position = state.current_position
        velocity = state.current_velocity
        acceleration = state.current_acceleration
        self._rested_before = self.resting
        self.slowed = False
        try:
            for _ in range(SLOWER):
                if not any(self._follow(offset) for offset in OFFSETS):
                    return False
                refused, share = self._refused(position)
                if not refused and share >= 1:
                    self.q[:] = self._next.new_position
                    return True
                self._set_state(position, velocity, acceleration)
                if refused:
                    return False
                self.slowed = True
                fastest = BETWEEN * share * np.abs(self._speeds).max(0)
                state.max_velocity = np.maximum(fastest, 1e-3 * np.array(self._velocity)).tolist()
            return False
        finally:
            state.max_velocity = self._velocity

    def _refused(self, position: list[float]) -> tuple[bool, float]:
        """Whether a guard refuses the motion to rest from the state just reached, where `position`
        [n] was the target before; and the share of its speed that the tool may have (1: all)."""
        if not self._guarded and self.forward is None:
            return False, 1.0
        if not self._plan_rest(position):
            return True, 1.0
        if (share := self._slow_share()) < 1:  # it is not taken, but a slower one
            return False, share
        return self._guarded and self._leaves_region(), 1.0

    def _slow_share(self) -> float:
        """The share of its speed that keeps the tool within its limit on the motion to rest; 1
        where it is slow enough."""
        if self.forward is None:
            return 1.0
        places = self.forward(np.concatenate([self._rest, self._rest + INSTANT * self._speeds]))
        ways = places[len(self._rest) :] - places[: len(self._rest)]
        fastest = float(np.sqrt((ways**2).sum(1).max())) / INSTANT
        return min(1.0, self.tool_speed / max(fastest, 1e-9))

    def _arrived(self) -> bool:
        """Whether the motion rests at `wanted`."""
        return self.resting and bool((np.abs(self.wanted - self.q) <= ROUNDING).all())

    def brake(self) -> Floats:
        """Move one tick towards rest, as fast as the limits allow; returns the joint target [n]."""
        self.slowed = False
        self._state.control_interface = ruckig.ControlInterface.Velocity
        if not self._step():  # its own commanded state is always valid: this is a bug, not a wish
            raise RuntimeError("the motion planner failed")
        self.q[:] = self._next.new_position
        return self.q

    def _follow(self, offset: float) -> bool:
        """Step towards `wanted`, or to `offset` before it: the planner fails where two kinds of
        motion meet to the last bit (from rest over 2 a^3 / j^2), but not next to it."""
        state = self._state
        state.control_interface = ruckig.ControlInterface.Position
        target = self.wanted
        if offset:
            target = target - offset * np.sign(target - np.asarray(state.current_position))
        state.target_position = target.tolist()
        return self._step()

    def _step(self) -> bool:
        """Plan and take one step; False where the planner finds none, and nothing has changed."""
        self._state.target_velocity = self._zeros
        self._state.target_acceleration = self._zeros
        try:
            result = self._planner.update(self._state, self._next)
        except NO_MOTION:
            return False
        if result not in SOLVED:
            return False
        self._next.pass_to_input(self._state)
        self.resting = bool(result == ruckig.Result.Finished)
        return True

    def _plan_rest(self, position: list[float]) -> bool:
        """Sample the motion to rest from the state just reached, where `position` [n] was the
        target before; False where the planner finds none."""
        self._state.control_interface = ruckig.ControlInterface.Velocity
        try:
            if self._planner.calculate(self._state, self._stop) not in SOLVED:
                return False
        except NO_MOTION:
            return False
        duration = float(self._stop.duration)
        last = len(self._rest) - 1
        for k in range(last + 1):
            self._rest[k], self._speeds[k], _ = self._stop.at_time(duration * k / last)
        self._path[0] = position
        self._path[1:] = self._rest[::FINER]
        return True

    def _leaves_region(self) -> bool:
        """Whether the sampled motion to rest leaves a region, or leads further out where the target
        before is outside. What was gained is not given back, so that many small bulges do not add
        up."""
        return any([self._leads_out(i, guard(self._path)) for i, guard in enumerate(self.guards)])

    def _leads_out(self, i: int, depths: Floats) -> bool:
        """Whether the path leads out of the region of guard number `i`, where its points have
        `depths` [SAMPLES + 1] (m)."""
        outside = np.minimum(depths, 0.0)
        now = float(outside[0])
        best = max(self._best_depths.get(i, -np.inf), now)
        if self._rested_before and now < best - BULGE:  # something else moved the arm
            best = now
        self._best_depths[i] = best
        reached = np.maximum.accumulate(outside)
        allowed = np.maximum(np.maximum(reached, best) - BULGE, now) - 1e-9
        return bool((depths < allowed).any())

    def _set_state(self, q: list[float], dq: list[float], ddq: list[float]) -> None:
        """Let the commanded motion be at `q`, `dq`, `ddq` [n]."""
        self._state.current_position = q
        self._state.current_velocity = dq
        self._state.current_acceleration = ddq
