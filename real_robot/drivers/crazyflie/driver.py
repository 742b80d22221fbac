"""Driver of a Crazyflie quadrotor over its radio: position set-points, landing, emergency stop.

Its `joints` are x, y, z and yaw (`embodied.embodiments.flight`). Its own firmware controls the
flight. A policy of rotor speeds cannot fly over a radio with gaps of 2 to 4 ms: it is compiled into
the firmware (docs/crazyflie.md).

    on the ground -> arming -> flying -> landing -> on the ground

It takes off when its target is more than `LIFT` above where it stands. It lands when it was held
for `hover` s, at every fault, and on close. The planner on board lands it, and finishes without us.
Only an operator's emergency stop switches the motors off in the air. After that, and after its own
watchdog did (2 s without a set-point), it has to be switched off and on. Nothing holds a drone:
without motors it falls.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import numpy as np

from embodied.core.bounds import Bound, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.embodiments.flight import JOINTS
from embodied.real_robot.drivers.crazyflie.link import (
    FLIGHT,
    HEALTH,
    Health,
    Info,
    Link,
    full_state,
    hover,
    position,
    refusal,
    stopped,
)
from embodied.real_robot.drivers.driver import Driver, Wait
from embodied.real_robot.ipc.external_state import ExternalStateReader
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.driver import DriverError, StopCategory

LIFT = 0.05  # m
ASK = 0.3  # s until an order that showed no effect is given again
SPEED = 0.4  # m/s that it lands with
KALMAN = 2  # of stabilizer.estimator
NEAR = 0.15  # m from its set-point, before a policy on board takes over
CLEAR = 0.25  # m above the ground, before a policy on board takes over
STEADY = 25  # set-points in a row of which that is true
BRIEF = 2.0  # s that a low voltage may last: motors that speed up pull it down


@dataclass(frozen=True)
class Config:
    """Settings of a Crazyflie.

    `command` says how set-points are sent: `position`; `full_state`, which also says how fast they
    move (for the Mellinger controller); `hover`, velocities and height, for a drone that knows no
    place but what its flow deck sees. `tracker` is a node such as
    `embodied.real_robot.ipc.external_state` that knows drone_x, drone_y, drone_z (m)."""

    uri: str  # radio://0/80/2M/E7E7E7E7E7 or udp://HOST:PORT
    low: Annotated[float, Bound(2.5, 20.0)]  # V: below it, it lands; yours, from your battery
    command: Literal["position", "full_state", "hover"] = "position"  # how set-points are sent
    tracker: Node | None = None  # what sees it from outside; null: it knows its place by itself
    hover: Annotated[float, Bound(0.0, 3600.0)] = 5.0  # s in the air without motion; then it lands
    silence: Wait = 0.5  # s without news after which the link is lost
    arming: Wait = 3.0  # s that arming may take
    patience: Wait = 30.0  # s for what is asked before anything moves
    certain: Positive = 0.01  # largest variance of its own place at the start, m^2
    place_gain: Annotated[float, Bound(0.0, 100.0)] = 1.0  # gain of `hover` towards a place, 1/s
    onboard: str = ""  # 8 digits (0 to f) of the hash of the policy in its firmware; empty: none

    def __post_init__(self) -> None:
        if self.onboard and not re.fullmatch("[0-9a-f]{8}", self.onboard):
            raise ConfigError("onboard: 8 digits (0 to f) of the policy's hash")


class Phase(Enum):
    """Phases of a flight."""

    GROUND = "on the ground"
    ARMING = "arming"
    FLYING = "flying"
    LANDING = "landing"
    CUT = "switched off"


class Crazyflie(Driver):
    """`read`, `write` and `hold` never wait for the radio."""

    joints = JOINTS

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.link = Link(config.uri, clock)
        self.tracker = (
            None if config.tracker is None else build(config.tracker, ExternalStateReader)
        )
        self.phase = Phase.GROUND
        self.ground = 0.0
        self._q = np.zeros(4)
        self._dq = np.zeros(4)
        self._sent = np.zeros(4)
        self._sent_at = -math.inf
        self._since = self._asked = self._fine = 0.0
        self._held: float | None = None
        self._steady = 0
        self._learned = False
        self._told: set[str] = set()

    def connect(self) -> None:
        try:
            if self.tracker is not None:
                self.tracker.connect()
            self.link.open(self.config.patience)
            self.link.set("commander.enHighLevel", 1)
            if self.tracker is not None:
                self.link.set("stabilizer.estimator", KALMAN)
            self.link.set("kalman.resetEstimation", 1)
            self.link.set("kalman.resetEstimation", 0)
            self.link.log("flight", FLIGHT, 0.01)
            self.link.log("health", HEALTH, 0.05)
            self._check_onboard()
            self._await(lambda: len(self.link.heard) == 2, "tell its state")
            if Info.FLYING in self._health().info:
                raise self.link.error("it is in the air: bring it down first")
            known = "find its place: look at what measures it"
            self._await(lambda: self._health().variance <= self.config.certain, known)
            self._check_health()
        except DriverError:
            self.close()
            raise
        self.phase = Phase.GROUND
        self._held = None
        self._fine = self.clock()
        self._told.clear()

    def check(self, limits: Limits) -> None:
        for axis, most in zip("xyz", limits.velocity[:3], strict=True):
            own = self.link.parameter(f"posCtlPid.{axis}VelMax")
            if own is not None and most > own:
                raise self.link.error(
                    f"limits.velocity of {axis} is {most:g} m/s, its own controller goes {own:g}"
                )

    def read(self) -> ArmState:
        self._feed()
        values, seen = self._news()
        self._q[:3] = [values[f"stateEstimate.{axis}"] for axis in "xyz"]
        yaw = math.radians(values["stateEstimate.yaw"])
        self._q[3] += math.remainder(yaw - self._q[3], 2 * math.pi)  # counted on over full turns
        self._dq[:3] = [values[f"stateEstimate.v{axis}"] for axis in "xyz"]
        self._dq[3] = math.radians(values["gyro.z"])
        self._advance()
        self._look()
        return ArmState(self._q.copy(), self._dq.copy(), np.zeros(4), seen)

    def write(self, q: Floats, width: float) -> None:
        if np.shape(q) != (4,) or not np.isfinite(q).all():
            raise self.link.error(f"was sent to {q}, which is no place")
        self._held = None
        if self.phase == Phase.GROUND and q[2] > self.ground + LIFT:
            self._enter(Phase.ARMING)
            self._arm(True)
        if self.phase == Phase.FLYING:
            self._follow(q)

    def hold(self, q: Floats, width: float) -> bool:
        if self.phase == Phase.ARMING:
            self._arm(False)
            self._enter(Phase.GROUND)
        if self.phase != Phase.FLYING:
            return False
        now = self.clock()
        self._held = now if self._held is None else self._held
        if now - self._held >= self.config.hover:
            self._land()
            return False
        self._follow(q)
        return True

    def halt(self) -> StopCategory:
        self.stop()
        return StopCategory.BRAKED

    def stop(self) -> None:
        """Land, wherever it is, and switch the motors off (stop category 1)."""
        if self.phase == Phase.ARMING:
            self._arm(False)
            self._enter(Phase.GROUND)
        elif self.phase == Phase.FLYING:
            self._land()

    def release(self) -> None:
        raise DriverError("a drone is not released: it would fall; stop makes it land")

    def cut(self) -> None:
        """Motors off, now, wherever it is (stop category 0). It falls, and is locked until it is
        switched off and on."""
        if self.link.connected:
            self._enter(Phase.CUT)
            for _ in range(3):
                self.link.tell(lambda drone: drone.supervisor.send_emergency_stop())

    def recover(self) -> None:
        """Leave a drone that still flies alone, ask a crashed one to recover, connect to a lost
        one again."""
        if not self.link.connected or self._silent() or self.phase == Phase.CUT:
            self.close()
            self.connect()
            return
        if self.phase == Phase.LANDING:
            self._come_down()
        if Info.CRASHED in self._health().info:
            self.link.tell(lambda drone: drone.supervisor.send_crash_recovery_request())
            self._await(lambda: Info.CRASHED not in self._health().info, "recover from its crash")
        self._check_health()
        self._told.clear()
        self._fine = self.clock()

    def close(self) -> None:
        self.stop()
        if self.link.connected and self.phase == Phase.LANDING:
            try:
                self._come_down()
            except DriverError:
                pass  # it lands by itself
            else:
                self._arm(False)
        self.link.close(flying=self.phase == Phase.LANDING)
        self.phase = Phase.GROUND

    def _check_onboard(self) -> None:
        """DriverError where another policy than the wanted one is in its firmware."""
        if not self.config.onboard:
            return
        carried = self.link.parameter("policy.hash")
        if carried is None or int(carried) != int(self.config.onboard, 16):
            has = "no policy" if carried is None else f"policy {int(carried):08x}"
            raise self.link.error(
                f"it carries {has}, not {self.config.onboard}: embodied export RUN --to DIR "
                "--crazyflie, then flash it (docs/crazyflie.md)"
            )

    def _check_health(self) -> None:
        """DriverError where it should not fly."""
        health = self._health()
        if reason := stopped(health):
            raise self.link.error(reason)
        if health.volts < self.config.low:
            raise self.link.error(f"its battery has {health.volts:.2f} V left: charge it")

    def _news(self) -> tuple[Any, float]:
        """The newest state and when it came; DriverError where there is none."""
        if self.link.lost:
            raise self.link.error(f"the link is lost ({self.link.lost}); it stops by itself")
        if self._silent():
            raise self.link.error(
                f"nothing heard for more than {self.config.silence:g} s: without set-points it "
                "levels after 0.5 s and switches its motors off after 2 s"
            )
        return self.link.heard["flight"]

    def _silent(self) -> bool:
        news = self.link.heard.get("flight")
        return news is None or self.clock() - news[1] > self.config.silence

    def _health(self) -> Health:
        return Health.of(self.link.heard["health"][0])

    def _feed(self) -> None:
        """Send the drone's estimator what is seen from outside."""
        if self.tracker is not None and self.link.connected:
            x, y, z = (float(each) for each in self.tracker.read())
            self.link.say("place", lambda drone: drone.extpos.send_extpos(x, y, z))

    def _look(self) -> None:
        """DriverError, once each, for what is wrong with it."""
        health = self._health()
        now = self.clock()
        armed = Info.ARMED in health.info
        reason = stopped(health)
        if not reason and self.phase == Phase.FLYING and now - self._since > 1 and not armed:
            reason = "it has disarmed itself in the air"
        if health.volts >= self.config.low:
            self._fine = now
        elif not reason and now - self._fine > BRIEF:
            reason = f"its battery has {health.volts:.2f} V left: it lands"
        if reason and (key := reason[:20]) not in self._told:
            self._told.add(key)
            raise self.link.error(reason)

    def _advance(self) -> None:
        """Change the phase by what the drone did about its last command."""
        health = self._health()
        now = self.clock()
        if self.phase == Phase.GROUND:
            self.ground = float(self._q[2])
        elif self.phase == Phase.ARMING:
            if Info.ARMED | Info.CAN_FLY in health.info:
                self._enter(Phase.FLYING)
            elif now - self._since > self.config.arming:
                self._enter(Phase.GROUND)
                raise self.link.error(f"it refuses to arm: {refusal(health)}")
            elif now - self._asked > ASK:
                self._arm(True)
        elif self.phase == Phase.LANDING and now - self._asked > ASK:
            if Info.FLYING not in health.info:
                self._arm(False)
                self._enter(Phase.GROUND)
            elif Info.PLANNING not in health.info and self._q[2] > self.ground + LIFT:
                self._order_landing()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._since = self.clock()

    def _arm(self, wanted: bool) -> None:
        self._asked = self.clock()
        self.link.tell(lambda drone: drone.supervisor.send_arming_request(wanted))

    def _follow(self, q: Floats) -> None:
        """The set-point, as the drone is configured to take it."""
        now = self.clock()
        place = [float(each) for each in q[:3]]
        yaw = float(q[3])
        since = now - self._sent_at
        rate = (q - self._sent) / since if 0 < since < 0.2 else np.zeros(4)
        self._sent[:] = q
        self._sent_at = now
        if self.config.onboard:
            # Hand over to the policy on board, once the drone was steady near its set-point for
            # half a second
            near = bool((np.abs(self._q[:3] - q[:3]) < NEAR).all())
            high = self._q[2] > self.ground + CLEAR
            self._steady = self._steady + 1 if near and high else 0
            if self._steady >= STEADY and not self._learned:
                self._learned = True
                self.link.tell(lambda drone: drone.param.set_value("policy.enable", 1))
        if self.config.command == "position":
            command = position(place, yaw)
        elif self.config.command == "full_state":
            command = full_state(place, yaw, rate)
        else:
            command = hover(place, yaw, rate, self._q, self.config.place_gain)
        self.link.say("setpoint", command)

    def _land(self) -> None:
        self._enter(Phase.LANDING)
        self._order_landing()

    def _order_landing(self) -> None:
        seconds = max(1.5, (float(self._q[2]) - self.ground) / SPEED)
        ground = self.ground
        learned = self._learned
        self._asked = self.clock()
        self._learned = False
        self._steady = 0

        def land(drone: Any) -> None:
            if learned:  # where a policy on board flew, its own controller does from here on
                drone.param.set_value("policy.enable", 0)
            drone.commander.send_notify_setpoint_stop()  # from here on its planner may
            drone.high_level_commander.land(ground, seconds, yaw=None)

        self.link.tell(land)

    def _come_down(self) -> None:
        """Wait until the drone has landed; DriverError."""

        def down() -> bool:
            self._news()
            self._q[2] = self.link.heard["flight"][0]["stateEstimate.z"]
            self._advance()
            return self.phase != Phase.LANDING

        self._await(down, "land")

    def _await(self, so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.config.patience
        while True:
            self._feed()
            if self.link.lost:
                raise self.link.error(self.link.lost)
            if so():
                return
            if time.monotonic() > deadline:
                raise self.link.error(f"it did not {what} (waited {self.config.patience:.0f} s)")
            time.sleep(0.01)
