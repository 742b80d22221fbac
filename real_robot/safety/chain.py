"""Safety chain: joint targets in, joint targets that may be sent out, at every control tick.

Stages run in a fixed order, learned ones before the hard limits, so that nothing learned has the
last word. What each stage changes is counted. A fault is latched: from then on the chain brings the
arm to rest within its limits, whatever is commanded, until an operator clears it.

    finite, fresh, enabled, heartbeat, hold_to_run, workspace, geometry, reflex, energy, torque,
    torque_rate, tracking, limits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from embodied.core.build import ConfigError
from embodied.real_robot.control.arm_state import ArmState, Floats
from embodied.real_robot.drivers.springs import Springs
from embodied.real_robot.safety.limits import Limiter

ORDER = (
    "finite",
    "fresh",
    "enabled",
    "heartbeat",
    "hold_to_run",
    "workspace",
    "geometry",
    "reflex",
    "energy",
    "torque",
    "torque_rate",
    "tracking",
)
"""Of the stages; the limits come after all of them."""


S = TypeVar("S")


@dataclass(slots=True)
class Tick:
    """One control tick: `q` [n] is what is wanted and, stage by stage, becomes what may be sent.

    `last` [n] was sent in the tick before; `seen` is when the observation was made that `q` comes
    from, `now` the time (s, monotonic). `hold` asks for rest, wherever that is reached, until it is
    no longer asked for; `fault` is a reason to stop for good, empty while there is none.
    `stiffness` [m] is what the driver's springs should become (None: they stay as they are).
    """

    q: Floats
    last: Floats
    arm: ArmState
    seen: float
    now: float
    hold: bool = False
    fault: str = ""
    stiffness: Floats | None = None


class Stage(Protocol):
    """Total: defined for every tick, never raises; changes `q` in place, asks to hold, or names a
    fault."""

    name: ClassVar[str]

    def begin(self, arm: ArmState) -> None:
        """The arm stands still at `arm`; forget what was."""
        ...

    def __call__(self, tick: Tick) -> None: ...


@runtime_checkable
class KnowsSprings(Protocol):
    """A stage that counts on the springs that the driver holds the arm with."""

    def check(self, springs: Springs | None) -> None: ...


class Chain:
    """`changed` [stages + 1] is how far each stage moved the newest target (rad or m; the limits
    last), `counts` in how many ticks each moved one. `stiffness` is what the driver's springs
    should become now (None: they stay as they are)."""

    def __init__(self, stages: Sequence[Stage], limiter: Limiter) -> None:
        names = [stage.name for stage in stages]
        if unknown := set(names) - set(ORDER):
            raise ConfigError(f"safety: there is no stage {min(unknown)!r} (known: {ORDER})")
        if len(set(names)) < len(names):
            raise ConfigError(f"safety: a stage is there twice in {names}")
        self.stages = sorted(stages, key=lambda stage: ORDER.index(stage.name))
        self.names = (*(stage.name for stage in self.stages), "limits")
        self.limiter = limiter
        self.changed = np.zeros(len(self.names))
        self.counts = np.zeros(len(self.names), np.int64)
        self.fault = ""
        self.stiffness: Floats | None = None
        self.aim: Floats | None = None
        """Where an arm that is held or has faulted lets the set-point go [n]; None: it brakes."""
        self._before = np.zeros(len(limiter.limits))

    def stage(self, kind: type[S]) -> S | None:
        """The stage of that kind; None where there is none."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def required(self, kind: type[S]) -> S:
        """The stage of that kind. ConfigError where there is none."""
        if (stage := self.stage(kind)) is not None:
            return stage
        raise ConfigError(f"safety: the chain has no stage {kind.__name__.lower()!r}")

    def begin(self, arm: ArmState) -> None:
        """Start from an arm at rest. A latched fault stays: `clear` is the operator's."""
        self.forget(arm)
        self.limiter.begin(arm.q)

    def forget(self, arm: ArmState) -> None:
        """Only the stages begin anew; the commanded motion goes on as it was."""
        for stage in self.stages:
            stage.begin(arm)
        self.changed[:] = 0

    def check(self, springs: Springs | None) -> None:
        """ConfigError where a stage counts on other springs than the driver's."""
        for stage in self.stages:
            if isinstance(stage, KnowsSprings):
                stage.check(springs)

    def clear(self) -> None:
        """The operator has seen the fault; the next `begin` starts afresh."""
        self.fault = ""

    def __call__(self, target: Floats, seen: float, arm: ArmState, now: float) -> Floats:
        """What to send [n] for the wanted target `target` [n]; valid until the next call."""
        tick = Tick(self.limiter.wanted, self.limiter.q, arm, seen, now)
        _put(tick.q, target, tick)
        for i, stage in enumerate(self.stages):
            np.copyto(self._before, tick.q)
            held = tick.hold
            stage(tick)
            self._count(i, tick.q)
            self.counts[i] += tick.hold and not held
            if tick.fault:
                break
        if tick.fault and not self.fault:
            self.fault = tick.fault
        self.stiffness = tick.stiffness
        if self.fault or tick.hold:
            return self.limiter.brake() if self.aim is None else self.limiter.unguarded(self.aim)
        np.copyto(self._before, tick.q)
        sent = self.limiter(tick.q)
        self._count(-1, sent)
        return sent

    @property
    def resting(self) -> bool:
        """Whether what is sent no longer moves."""
        return self.limiter.resting

    def _count(self, at: int, q: Floats) -> None:
        np.subtract(q, self._before, out=self._before)
        np.abs(self._before, out=self._before)
        self.changed[at] = self._before.max()
        self.counts[at] += self.changed[at] > 1e-9


def _put(q: Floats, target: Floats, tick: Tick) -> None:
    """`target` into `q`, or a fault where it does not have its shape."""
    if np.shape(target) == q.shape:
        np.copyto(q, target)
    else:
        np.copyto(q, tick.last)
        tick.fault = f"the command has shape {np.shape(target)} for {len(q)} joints"
