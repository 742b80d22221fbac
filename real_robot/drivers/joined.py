"""JoinedDriver: several robots as one, with one control process, one clock and one safety chain.

Joint vectors are concatenated in the order of `robots`; a hand's opening (m) is one more joint at
the end of its arm. An error of one robot is a fault of all: the others are still written to, so
that the safety chain brings them to rest within their limits. Robots are read and written one after
the other in every tick; `skew` is how far apart in time their measurements are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np

from embodied.core.build import ConfigError, Node, build
from embodied.real_robot.drivers.driver import Driver, Outside
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.driver import DriverError, StopCategory, droop_of, unloaded
from embodied.real_robot.kernel.hand import Grasp


@dataclass(frozen=True)
class Config:
    """Settings of several robots that are one."""

    robots: dict[str, Node]  # node of each driver, by its prefix
    hands: tuple[str, ...] = ()  # prefixes of the robots whose hand's opening is a joint
    more: dict[str, Node] = field(default_factory=dict[str, Node])  # settings from an emulator

    def __post_init__(self) -> None:
        if len(self.robots) < 2:
            raise ConfigError("driver.robots should name two robots or more, as left and right")
        for name in (*self.hands, *self.more):
            if name not in self.robots:
                known = ", ".join(self.robots)
                raise ConfigError(f"driver: there is no robot {name} (known: {known})")


@dataclass(slots=True)
class Part:
    """One robot: its driver, its joints `at` in the joint vector, and whether a `hand` follows.
    `sent` is the hand's opening (m), `t` the time (s) of the newest measurement."""

    name: str
    driver: Driver
    at: slice
    hand: bool
    sent: float = 0.0
    t: float = 0.0
    lost: bool = False
    grasp: Grasp = field(default_factory=Grasp)

    @property
    def whole(self) -> slice:
        """Slice of the robot's joints and hand in the joint vector."""
        return slice(self.at.start, self.at.stop + self.hand)


class JoinedDriver(Driver):
    """`sensed`: what each robot senses, with its prefix, then `skew` (s)."""

    def __init__(self, config: Config) -> None:
        self.parts: list[Part] = []
        names: list[str] = []
        for name, node in config.robots.items():
            driver = build({**node, **config.more.get(name, {})}, Driver)
            start, hand = len(names), name in config.hands
            names += [f"{name}_{joint}" for joint in driver.joints]
            self.parts.append(Part(name, driver, slice(start, len(names)), hand))
            names += [f"{name}_gripper"] if hand else []
        self.joints = tuple(names)
        sensed = [f"{p.name}_{word}" for p in self.parts for word in p.driver.sensed]
        self.sensed = (*sensed, "skew")
        self.falls_when_released = any(p.driver.falls_when_released for p in self.parts)  # type: ignore[misc]
        grips = [p.driver.grip for p in self.parts if p.driver.grip is not None]
        self.grip = max(grips, default=None)
        n = len(names)
        self._state = ArmState(np.zeros(n), np.zeros(n), np.zeros(n), 0.0)
        self._skew = 0.0

    def connect(self) -> None:
        """Connect all robots; where one fails, none stays connected."""
        opened: list[Part] = []
        for part in self.parts:
            try:
                part.driver.connect()
            except DriverError as error:
                for other in opened:
                    other.driver.stop()
                    other.driver.close()
                raise _named(part, error) from error
            opened.append(part)
            part.lost = False
            part.t = 0.0
        self.read()
        for part in self.parts:
            part.sent = part.driver.width

    def read(self) -> ArmState:
        """Measure all robots; DriverError with what was measured where one does not answer."""
        before = self._state
        times = list[float]()
        problem: DriverError | None = None
        state = ArmState(before.q.copy(), before.dq.copy(), before.tau.copy(), before.t)
        try:
            self._each(lambda part: self._measure(part, state, times, before))
        except DriverError as error:
            problem = error
        if times:
            state.t = min(times)
            self._skew = max(times) - min(times)
        self._state = state
        if problem is not None:
            raise DriverError(str(problem), state if times else None)
        return state

    def _measure(self, part: Part, state: ArmState, times: list[float], before: ArmState) -> None:
        arm = part.driver.read()
        state.q[part.at] = arm.q
        state.dq[part.at] = arm.dq
        state.tau[part.at] = arm.tau
        times.append(arm.t)
        if part.hand:
            at, width = part.at.stop, part.driver.width
            passed, known = arm.t - part.t, part.t > 0 and arm.t > part.t
            state.dq[at] = (width - before.q[at]) / passed if known else before.dq[at]
            state.q[at] = width
            part.grasp.see(width, part.sent, arm.t)
        part.t = arm.t

    def write(self, q: Floats, width: float) -> None:
        self._each(lambda part: part.driver.write(q[part.at], self._hand(part, q)))

    def hold(self, q: Floats, width: float) -> bool:
        """A hand that holds nothing closes no further than where it is measured."""
        held: list[bool] = []

        def do(part: Part) -> None:
            part.sent = self._hand(part, q)
            if part.hand and not part.grasp.held:
                part.sent = max(part.sent, part.driver.width)
            held.append(part.driver.hold(q[part.at], part.sent))

        self._each(do)
        return all(held)

    def limit_hand(self, speed: float, force: float) -> None:
        """A hand that holds something keeps its force, unless all are to be limp."""

        def do(part: Part) -> None:
            if not part.grasp.held or not force:
                part.driver.limit_hand(speed, force)

        self._each(do)

    def _hand(self, part: Part, q: Floats) -> float:
        part.sent = float(q[part.at.stop]) if part.hand else part.sent
        return part.sent

    def _each(self, do: Callable[[Part], object]) -> None:
        """Call `do` for every robot, also where another one's wire is broken; then DriverError."""
        problem: DriverError | None = None
        for part in self.parts:
            try:
                do(part)
            except DriverError as error:
                part.lost = True
                problem = problem or _named(part, error)
        if problem is not None:
            raise problem

    def sense(self) -> Floats:
        known = [part.driver.sense() for part in self.parts]
        return np.concatenate([*known, [self._skew]])

    def droop(self, q: Floats) -> Floats:
        """A hand that holds something is kept where it was sent: it is no arm that presses."""
        found = np.zeros(len(self.joints))
        for part in self.parts:
            found[part.at] = droop_of(part.driver)(q[part.at])
            if part.hand:
                found[part.at.stop] = part.sent - q[part.at.stop]
        return found

    def unloaded(self, stretch: Floats) -> None:
        for part in self.parts:
            unloaded(part.driver, stretch[part.at])

    def outside(self) -> Outside | None:
        """Each robot's own with its prefix, its hand after its joints; None where one has none."""
        names, zero, unit = list[str](), list[float](), list[float]()
        for part in self.parts:
            own = part.driver.outside()
            if own is None or (part.hand and not own.hand):
                return None
            kept = own.joints + part.hand
            names += [f"{part.name}_{name}" for name in own.names[:kept]]
            zero += own.zero[:kept]
            unit += own.unit[:kept]
        return Outside(tuple(names), tuple(zero), tuple(unit), len(names))

    def calibration(self) -> str:
        return "\n".join(filter(None, (part.driver.calibration() for part in self.parts)))

    def reach(self) -> tuple[Floats, Floats] | None:
        found = [part.driver.reach() for part in self.parts]
        low, high = np.full((2, len(self.joints)), np.inf) * [[-1.0], [1.0]]
        for part, known in zip(self.parts, found, strict=True):
            if known is None:
                return None
            low[part.at], high[part.at] = known
        return low, high

    def check(self, limits: Limits) -> None:
        """Check each robot's own part of `limits`."""
        for part in self.parts:
            own = {f.name: getattr(limits, f.name)[part.at] for f in fields(limits)}
            try:
                part.driver.check(Limits(**own))
            except DriverError as error:
                raise _named(part, error) from error

    def renew(self) -> None:
        for part in self.parts:
            part.driver.renew()

    def cut(self) -> None:
        for part in self.parts:
            part.driver.cut()

    def release(self) -> None:
        """Release all robots; where one cannot be released, none stays released."""
        try:
            for part in self.parts:
                part.driver.release()
        except DriverError:
            self.engage()
            raise

    def engage(self) -> None:
        self._each(lambda part: part.driver.engage())

    def recover(self) -> None:
        self._each(lambda part: part.driver.recover())
        for part in self.parts:
            part.lost = False

    def halt(self) -> StopCategory:
        return min(part.driver.halt() for part in self._broken())

    def stop(self) -> None:
        for part in self._broken():
            part.driver.stop()

    def _broken(self) -> list[Part]:
        """Robots to stop: those whose wire is broken, or all where none is; the others are being
        brought to rest."""
        return [part for part in self.parts if part.lost] or self.parts

    def close(self) -> None:
        for part in self.parts:
            part.driver.close()


def _named(part: Part, error: DriverError) -> DriverError:
    return DriverError(f"{part.name}: {error}", error.measured)
