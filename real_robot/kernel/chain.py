"""Safety chain: joint targets in, joint targets that may be sent out, at every control tick.

Stages run in a fixed order, learned ones before the hard limits, so that nothing learned has the
last word. What each stage changes is counted. A fault is latched: from then on the chain brings the
arm to rest within its limits, whatever is commanded, until an operator clears it.

    finite, fresh, enabled, heartbeat, hold_to_run, force, overspeed, outside, workspace, geometry,
    reflex, energy, torque, torque_rate, tracking, limits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from embodied.core.errors import ConfigError
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.driver import Springs
from embodied.real_robot.kernel.hand import HandLimiter
from embodied.real_robot.kernel.limiter import Limiter

ORDER = (
    "finite",
    "fresh",
    "enabled",
    "heartbeat",
    "hold_to_run",
    "force",
    "overspeed",
    "outside",
    "workspace",
    "geometry",
    "reflex",
    "energy",
    "torque",
    "torque_rate",
    "tracking",
)
"""Order in which the stages run. The hard limits run last."""


S = TypeVar("S")


@dataclass(slots=True)
class Tick:
    """One control tick, which the stages change one after the other."""

    q: Floats
    """Joint target [n] (rad, m): what is wanted, then what may be sent."""
    last: Floats
    """Joint target [n] that was sent in the tick before."""
    arm: ArmState
    """The newest measurement."""
    seen: float
    """Time (s, monotonic) of the observation that `q` comes from."""
    now: float
    """Time (s, monotonic) of this tick."""
    hold: bool = False
    """Whether the arm should come to rest, as long as this is asked for."""
    fault: str = ""
    """Reason to stop for good; empty: none."""
    stiffness: Floats | None = None
    """Stiffness [m] that the driver's springs should become; None: they stay as they are."""
    guided: bool = False
    """Whether a person moves the released arm by hand."""
    back: Floats | None = None
    """Joint positions [n] that let go of what the arm touched; None: it touched nothing."""

    def fail(self, reason: str) -> None:
        """Name a reason to stop for good. The first reason of a tick stays."""
        self.fault = self.fault or reason


class Stage(Protocol):
    """A stage changes `q` in place, asks to hold, or names a fault. It is defined for every tick
    and never raises."""

    name: ClassVar[str]

    def begin(self, arm: ArmState) -> None:
        """Forget what was; the arm stands still at `arm`."""
        ...

    def __call__(self, tick: Tick) -> None:
        """Check or change `tick`."""
        ...


@runtime_checkable
class KnowsSprings(Protocol):
    """A stage that counts on the springs that the driver holds the arm with."""

    def check(self, springs: Springs | None) -> None:
        """ConfigError where the driver holds the arm with other springs."""
        ...


class Chain:
    """The stages in their order, then the hard limits; beside them, those of the `hand`."""

    def __init__(
        self, stages: Sequence[Stage], limiter: Limiter, hand: HandLimiter | None = None
    ) -> None:
        names = [stage.name for stage in stages]
        if unknown := set(names) - set(ORDER):
            raise ConfigError(f"safety: there is no stage {min(unknown)!r} (known: {ORDER})")
        if len(set(names)) < len(names):
            raise ConfigError(f"safety: a stage is there twice in {names}")
        self.stages = sorted(stages, key=lambda stage: ORDER.index(stage.name))
        self.names = (*(stage.name for stage in self.stages), "limits")
        self.limiter = limiter
        self.hand = hand
        """Limits of the hand; None: there is no hand."""
        self.changed = np.zeros(len(self.names))
        """Distance [stages + 1] (rad, m) by which each stage, and last the limits, moved the newest
        target."""
        self.counts = np.zeros(len(self.names), np.int64)
        """Ticks [stages + 1] in which each of them moved a target or began to hold."""
        self.fault = ""
        """The latched reason to stop; empty: none."""
        self.stiffness: Floats | None = None
        """Stiffness [m] that the driver's springs should become now; None: they stay."""
        self.aim: Floats | None = None
        """Joint target [n] of an arm that is held or has faulted; None: it brakes."""
        self.guided = False
        """Whether a person moves the released arm by hand."""
        self.back: Floats | None = None
        """Joint positions [n] that let go, of the fault that was latched in this tick; None: it
        was no touch."""
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
        """Let only the stages begin anew; the commanded motion goes on as it was."""
        for stage in self.stages:
            stage.begin(arm)
        self.changed[:] = 0

    def check(self, springs: Springs | None) -> None:
        """ConfigError where a stage counts on other springs than the driver's."""
        for stage in self.stages:
            if isinstance(stage, KnowsSprings):
                stage.check(springs)

    def clear(self) -> None:
        """Clear the latched fault, which the operator has seen."""
        self.fault = ""

    def __call__(self, target: Floats, seen: float, arm: ArmState, now: float) -> Floats:
        """The joint target [n] to send where `target` [n] is wanted; valid until the next call.

        `seen` (s) is the time of the observation that `target` comes from."""
        tick = Tick(self.limiter.wanted, self.limiter.q, arm, seen, now, guided=self.guided)
        _put_target(target, tick)
        for i, stage in enumerate(self.stages):
            np.copyto(self._before, tick.q)
            held_before = tick.hold
            stage(tick)
            self._count(i, tick.q)
            self.counts[i] += tick.hold and not held_before
            if tick.fault:
                break
        self.back = None
        if tick.fault and not self.fault:
            self.fault = tick.fault
            self.back = tick.back
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

    def _count(self, stage: int, q: Floats) -> None:
        """Note how far stage number `stage` moved the target, which is `q` [n] now."""
        np.subtract(q, self._before, out=self._before)
        np.abs(self._before, out=self._before)
        self.changed[stage] = self._before.max()
        self.counts[stage] += self.changed[stage] > 1e-9


def _put_target(target: Floats, tick: Tick) -> None:
    """Copy `target` into `tick.q`; a target of another shape is a fault."""
    if np.shape(target) == tick.q.shape:
        np.copyto(tick.q, target)
    else:
        np.copyto(tick.q, tick.last)
        tick.fail(f"the command has shape {np.shape(target)} for {len(tick.q)} joints")
