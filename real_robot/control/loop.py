"""Control loop: owns the robot's driver and keeps its rate and limits when other processes die.

Each tick: measure, handle the operator's request, follow the newest action chunk through the
safety chain, send, publish the state. The loop imports no torch and never waits for another
process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from embodied.core.build import ConfigError
from real_robot.control.arm_state import ArmState, Floats
from real_robot.control.chunk_follower import Chunk, ChunkFollower
from real_robot.control.homing import Homing
from real_robot.control.rate import Rate
from real_robot.drivers.driver import Driver, DriverError
from real_robot.ipc.channels import Channels
from real_robot.ipc.messages import MOST_ACTION, Command, Mode
from real_robot.ipc.ring_buffer import BlackBox
from real_robot.safety.chain import Chain
from real_robot.safety.checks import Enabled, Fresh

MOVING = (Mode.ARMED, Mode.RUNNING, Mode.HOMING, Mode.STOPPING)
S = TypeVar("S")


def _only(chain: Chain, kind: type[S]) -> S:
    """The chain's stage of that kind; ConfigError where it has none."""
    for stage in chain.stages:
        if isinstance(stage, kind):
            return stage
    raise ConfigError(f"safety: the chain has no stage {kind.__name__.lower()!r}")


class Control:
    """`turn` is everything; `run` calls it at a rate."""

    def __init__(
        self,
        driver: Driver,
        chain: Chain,
        follower: ChunkFollower,
        channels: Channels,
        clock: Callable[[], float] = time.monotonic,
        ring: BlackBox | None = None,
        homing: Homing | None = None,
        open_at_home: float | None = None,
    ) -> None:
        self.homing, self.open_at_home = homing, open_at_home
        self.driver, self.chain, self.follower, self.channels = driver, chain, follower, channels
        self.clock, self.ring = clock, ring
        self.enabled, self.fresh = _only(chain, Enabled), _only(chain, Fresh)
        self.mode, self.fault, self.ticks = Mode.DISCONNECTED, "", 0
        self.quit = False
        self.leave = ""
        """Why to come to rest and then quit; a signal or another thread may set it."""
        self.arm: ArmState | None = None
        self.width = 0.0
        self._target = np.zeros(len(chain.limiter.limits))
        self._proposed = np.zeros(len(chain.limiter.limits))

    def connect(self) -> None:
        """Open the wire; the arm stays where it is. DriverError."""
        self.driver.connect()
        self.driver.check(self.chain.limiter.limits)
        self.arm = self.driver.read()
        self._begin_at_rest(self.arm, self.arm.q)
        self.mode = Mode.IDLE

    def run(self, rate: Rate) -> None:
        """Until an operator quits. The collector of garbage is off meanwhile: turns leave none."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            rate.begin()
            while not self.quit:
                rate.wait()
                self.turn(rate)
        finally:
            gc.enable()
            self.driver.stop()

    def turn(self, rate: Rate | None = None) -> None:
        """One tick."""
        now = self.clock()
        self._measure(now)
        if self.channels.request.receive():
            self._handle_request(now)
            now = self.clock()  # a robot that is to recover takes its time
        if self.channels.chunk.receive():
            self._receive_chunk()
        if self.leave:
            self._stop_for_good(self.leave)
            self.quit = self.mode == Mode.DISCONNECTED or self.chain.resting
        if self.mode != Mode.DISCONNECTED:
            self._move(now)
        self._publish(now, rate)

    def _measure(self, now: float) -> None:
        if self.mode == Mode.DISCONNECTED:
            return
        try:
            self.arm = self.driver.read()
        except DriverError as error:
            self._connection_lost(error)

    def _handle_request(self, now: float) -> None:
        request = self.channels.request.fields
        done = self._apply(Command(int(request["command"][0])), now)
        self.channels.state.fields["answered" if done else "refused"] = request["number"]

    def _apply(self, command: Command, now: float) -> bool:
        """Whether that could be done in this mode."""
        mode = self.mode
        if command == Command.ESTOP:
            self._stop_for_good("an operator pressed stop")
            self.driver.cut()
        elif command == Command.QUIT and mode in (Mode.DISCONNECTED, Mode.IDLE, Mode.ESTOP):
            self.quit = True
        elif command == Command.ARM and mode == Mode.IDLE and self.arm is not None:
            self._begin_at_rest(self.arm, self._hold_target(self.arm))
            self.mode = Mode.ARMED
        elif command == Command.START and mode == Mode.ARMED and self._ready(now):
            self.follower.begin(self.chain.limiter.q, self.width, now)
            self.enabled.on, self.mode = True, Mode.RUNNING
        elif command == Command.HOME and mode == Mode.IDLE and self._go_home(now):
            self.mode = Mode.HOMING
        elif command == Command.STOP and mode in MOVING:
            self.enabled.on, self.mode = False, Mode.STOPPING
        elif command == Command.RESET and mode == Mode.ESTOP and self.chain.resting:
            self._reset()
        else:
            return command == Command.NOTHING
        return True

    def _ready(self, now: float) -> bool:
        """The policy has just spoken, and the arm is where it was sent: it will not jump."""
        assert self.arm is not None
        apart = np.abs(self.arm.q - self.chain.limiter.q)
        near = (apart < 0.2 * np.asarray(self.chain.limiter.limits.tracking)).all()
        return bool(near) and now - self.follower.seen <= self.fresh.config.hold

    def _go_home(self, now: float) -> bool:
        """Plan the way home from here; False without a home or a measurement."""
        if self.homing is None or self.arm is None:
            return False
        self._begin_at_rest(self.arm, self._hold_target(self.arm))
        self.homing.begin(self.chain.limiter.q, now)
        self.enabled.on = True
        self.width = self.width if self.open_at_home is None else self.open_at_home
        return True

    def _come_home(self) -> None:
        self.enabled.on, self.mode = False, Mode.IDLE
        self.driver.renew()

    def _hold_target(self, arm: ArmState) -> Floats:
        """Where to begin: where the arm is held, or where it is, if that is somewhere else.

        An impedance controller holds an arm a little below where it was sent; beginning arrived
        would let it sink.
        """
        held, most = self.chain.limiter.q.copy(), np.asarray(self.chain.limiter.limits.tracking)
        return held if bool((np.abs(arm.q - held) <= most).all()) else arm.q

    def _begin_at_rest(self, arm: ArmState, q: Floats) -> None:
        """From rest at `q`."""
        self.enabled.on, self.width = False, self.driver.width
        self.chain.begin(replace(arm, q=q))
        self.follower.begin(q, self.width, self.clock())

    def _reset(self) -> None:
        try:
            self.driver.recover()
            self.arm = self.driver.read()
        except DriverError as error:
            self._connection_lost(error)
            return
        self.chain.clear()
        self.follower.forget()  # it may have been said on another clock
        self.fault, self.mode = "", Mode.IDLE
        self._begin_at_rest(self.arm, self._hold_target(self.arm))

    def _receive_chunk(self) -> None:
        fields = self.channels.chunk.fields[0]
        actions = fields["actions"][: fields["steps"], : fields["size"]].astype(np.float64)
        self.follower.take(Chunk(actions, float(fields["start"]), float(fields["seen"])))

    def _move(self, now: float) -> None:
        """What is sent in this tick, in every mode: an arm that nobody moves is held."""
        arm, arrived = self.arm, False
        assert arm is not None
        running = self.mode == Mode.RUNNING
        if running:
            self.follower(arm.q, now, self._target)
            self.width = self.follower.width
        elif self.mode == Mode.HOMING and self.homing is not None:
            arrived = self.homing(now, self._target)
        else:
            np.copyto(self._target, self.chain.limiter.q)
        np.copyto(self._proposed, self._target)
        sent = self.chain(self._target, self.follower.seen if running else now, arm, now)
        if self.chain.fault and self.mode != Mode.ESTOP:
            self._stop_for_good(self.chain.fault)
        if self.mode == Mode.STOPPING and self.chain.resting:
            self.mode = Mode.IDLE
        if self.mode == Mode.HOMING and arrived and self.chain.resting:
            self._come_home()
        try:
            self._send(sent, arm)
        except DriverError as error:
            self._connection_lost(error)

    def _send(self, sent: Floats, arm: ArmState) -> None:
        if self.mode not in (Mode.IDLE, Mode.ESTOP):
            self.driver.write(sent, self.width)
        elif not self.driver.hold(sent, self.width):
            self.chain.begin(arm)  # it moves by itself, and is followed

    def _stop_for_good(self, reason: str) -> None:
        """Latched: the chain brakes from now on, and only `reset` leads on."""
        self.chain.fault = self.chain.fault or reason
        self.fault = self.fault or reason
        self.enabled.on = False
        if self.mode != Mode.DISCONNECTED:
            self.mode = Mode.ESTOP

    def _connection_lost(self, error: DriverError) -> None:
        """The wire is gone: the robot's own watchdog stops it, and we say why."""
        self._stop_for_good(str(error))
        self.driver.stop()
        self.mode = Mode.ESTOP

    def _publish(self, now: float, rate: Rate | None) -> None:
        fields, arm, chain = self.channels.state.fields, self.arm, self.chain
        self.ticks += 1
        fields["tick"], fields["now"], fields["mode"] = self.ticks, now, self.mode
        if arm is not None:
            fields["measured"] = arm.t
            fields["q"], fields["dq"], fields["tau"] = arm.q, arm.dq, arm.tau
            fields["width"] = self.driver.width
            fields["sensed"] = self.driver.sense()
            self._publish_step(fields[0])
        fields["proposed"], fields["filtered"] = self._proposed, chain.limiter.wanted
        fields["sent"], fields["sent_width"] = chain.limiter.q, self.width
        fields["changed"], fields["counts"] = chain.changed, chain.counts
        fields["starved"], fields["fault"] = self.follower.starved, self.fault.encode()
        if rate is not None:
            fields["missed"], fields["late"], fields["worst"] = rate.missed, rate.late, rate.worst
        self.channels.state.send()
        if self.ring is not None:
            self.ring.add(fields)

    def _publish_step(self, fields: Any) -> None:
        follower = self.follower
        size = min(len(follower.action), MOST_ACTION)
        fields["step"], fields["followed"], fields["size"] = follower.step, follower.seen, size
        fields["action"][:size] = follower.action[:size]
