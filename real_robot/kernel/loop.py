"""Control loop: owns the robot's driver and keeps its rate and limits when other processes die.

Each tick does this: measure, handle the operator's request, ask the source that moves the arm in
this mode for a set-point, take that through the safety chain, send, publish the state. The loop
never waits for another process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.channels import KernelChannels
from embodied.real_robot.kernel.checks import DaemonAlive, Fresh, HoldToRun
from embodied.real_robot.kernel.driver import (
    ArmDriver,
    DriverError,
    droop_of,
    springs_of,
    stiffen,
    unloaded,
)
from embodied.real_robot.kernel.guarded_loop import GuardedLoop
from embodied.real_robot.kernel.last_resort import logged
from embodied.real_robot.kernel.measured import Force
from embodied.real_robot.kernel.messages import PRESSED_AGAIN, Command, Mode
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.kernel.report import Episode, Recorder
from embodied.real_robot.kernel.source import SetPoint, Source, problem_of
from embodied.real_robot.kernel.yielding import Yielding

RESETS = (Mode.ESTOP, Mode.RELEASED)
RELEASES = (Command.RELEASE, Command.RELEASE_SUPPORTED)
GIVE_UP = 0.5  # s for which an arm that was stopped may be unheard, or away from its set-point
FAR = 0.1  # rad (m) of a command that a latched stop has to refuse
NEAR = 1e-3  # rad (m): distance of a set-point that has come to the end of its motion
LET_GO = 0.3  # s for which the set-point stays where it lets go of what the arm touched
MOVING = (Mode.ARMED, Mode.RUNNING, Mode.HOMING, Mode.STOPPING)


class ControlLoop(GuardedLoop):
    """The modes of an arm, what moves it in each of them, and how it stops for good.

    `source` moves it while it is RUNNING, `homing` on its way home (None: there is no home).

    A stop is latched: the set-point comes to rest and then moves to the measured pose. Only a reset
    ends it, and the arm continues from where it is.
    """

    def __init__(
        self,
        driver: ArmDriver,
        chain: Chain,
        source: Source,
        channels: KernelChannels,
        clock: Callable[[], float] = time.monotonic,
        ring: Recorder | None = None,
        homing: Source | None = None,
    ) -> None:
        super().__init__(driver, chain, channels, clock, ring)
        self.source = source
        self.homing = homing
        self.droop = droop_of(driver)
        self.yielding = Yielding(chain.limiter.limits, self.droop)
        self._sensed = np.zeros(len(driver.sensed))
        self._connection_failed = False
        """Whether the wire failed since the last reset."""
        self._home_pending = False
        """Whether the way home begins as soon as the set-point has yielded."""
        self._followed = 0.0
        """When (s) the arm was last seen to follow a latched stop."""
        self._given_up = False
        """Whether a latched stop was handed to the robot's own controller."""
        self._testing = False
        """Whether the stop is being tested, and nothing of it reaches the robot."""
        self._compliant = False
        """Whether the driver was told to release the arm and not yet to hold it again."""
        self.fresh = chain.required(Fresh)
        self.presence = Presence(chain, channels)
        self._waiting = False
        self._target = np.zeros(len(chain.limiter.limits))
        self._proposed = np.zeros(len(chain.limiter.limits))
        self._sent_width = 0.0

    def _turn(self, now: float, rate: Rate | None) -> None:
        self._measure()
        self._check_emergency_stop(now)
        if self.watchdog is not None and (reason := self.watchdog.fault):
            self._stop_for_good(reason)
        self.presence.listen(now)
        if self.channels.request.receive():
            self._handle_request(now)
            now = self.clock()  # a robot that is to recover takes its time
        self._listen(now)
        self._wait(now)
        if self.episode.over(now):
            self.enabled.on = False
            self.mode = Mode.STOPPING
        if self.quit_reason:
            self._stop_for_good(self.quit_reason)
            self.quit = self.mode == Mode.DISCONNECTED or self._yielded
        if self.mode != Mode.DISCONNECTED:
            self._move(now)
        self._watch_stop(now)
        self._publish(now, rate)

    def _apply(self, command: Command, now: float) -> bool:
        """Do what an operator asks; False where this mode does not allow it."""
        mode = self.mode
        if command == Command.ESTOP:
            self._stop_for_good("an operator pressed stop")
            self.yielding.begin(self.chain.limiter.q, now, moving=True)
            if not self._testing:
                self.driver.cut()
        elif command == Command.QUIT and mode in (Mode.DISCONNECTED, Mode.IDLE, Mode.ESTOP):
            self.quit = True
        elif command in (Command.ARM, Command.HOME) and not self.presence.daemon_speaks(now):
            return False
        elif command == Command.ARM and mode == Mode.IDLE and self.arm is not None:
            self._rest(self.arm, now)
            self.mode = Mode.ARMED
        elif command == Command.START and mode == Mode.ARMED and self._ready(now):
            unloaded(self.driver, self.chain.limiter.q - self.yielding.pose)
            self.episode.begin(self._seconds, now)
            self._begin(self.source, now)
            self.enabled.on = True
            self.mode = Mode.RUNNING
        elif command == Command.HOME and mode == Mode.IDLE and self._go_home(now):
            self.mode = Mode.HOMING
        elif command == Command.STOP and mode in MOVING:
            self.enabled.on = False
            self.mode = Mode.STOPPING
        elif command == Command.RESET and mode in RESETS and self.resting and self._stop_is_seen():
            self._reset()
        elif command in RELEASES and mode in (Mode.IDLE, Mode.ESTOP) and self.resting:
            return self._release(supported=command == Command.RELEASE_SUPPORTED)
        else:
            return command == Command.NOTHING
        return True

    def _stop_is_seen(self) -> bool:
        """Whether the operator who resets has seen the newest press of the emergency stop, and it
        was acted on."""
        seen = int(self.channels.request.fields["stop"][0])
        if seen == self._stop_number == self.channels.estop.number:
            return True
        self.writer.explain(PRESSED_AGAIN)
        return False

    @property
    def _seconds(self) -> float:
        """Time limit (s) of an episode in the newest request; 0: none."""
        return float(self.channels.request.fields["seconds"][0])

    def _ready(self, now: float) -> bool:
        """Whether an episode may start without a jump: the source has seen the arm of late, and the
        arm is where it was sent."""
        if self.arm is None or not Episode.possible(self._seconds):
            return False
        error = np.abs(self.arm.q - self.chain.limiter.q)
        near = (error < 0.2 * np.asarray(self.chain.limiter.limits.tracking)).all()
        fresh = now - self.source.point.seen <= self.fresh.config.hold
        return bool(near) and self.chain.resting and fresh

    def _go_home(self, now: float) -> bool:
        """Plan the way home from here; False without a home, a measurement or a free way."""
        if self.homing is None or self.arm is None:
            return False
        if reason := self.homing.why_not(self.chain.limiter.q):
            self.writer.explain(reason)
            return False
        self._rest(self.arm, now)
        self._home_pending = True
        return True

    def _listen(self, now: float) -> None:
        """Let the sources take what has come. What cannot be followed is a fault where the arm
        follows the source, or is about to; elsewhere it is dropped."""
        self.source.listen(now)
        if self.homing is not None:
            self.homing.listen(now)
        if self.mode in (Mode.ARMED, Mode.RUNNING) and (problem := self._problem_of(self.source)):
            self._stop_for_good(problem)

    def _problem_of(self, source: Source) -> str:
        """Why the newest set-point of `source` cannot be followed; empty where it can."""
        return problem_of(source.point, len(self._target))

    def _begin(self, source: Source, now: float) -> None:
        """Let `source` move the arm from here, and its hand."""
        source.begin(self.chain.limiter.q.copy(), self.width, now)
        if not self._problem_of(source):
            self.width = source.point.width

    @property
    def _mover(self) -> Source | None:
        """What moves the arm now; None where it is held."""
        if self.mode == Mode.RUNNING:
            return self.source
        return self.homing if self.mode == Mode.HOMING and not self._home_pending else None

    def _wait(self, now: float) -> None:
        """Let an arm that moves by itself wait while the daemon is silent or the key of
        hold-to-run is released; it continues from where it came to rest."""
        waited = self._waiting
        self._waiting = self.presence.waits(now, self.mode in MOVING)
        if waited and not self._waiting and (mover := self._mover) is not None:
            self._begin(mover, now)

    def _move(self, now: float) -> None:
        """Send this tick's joint target, in every mode: an arm that is not moved is held."""
        arm = self.arm
        assert arm is not None
        self.chain.aim = None
        seen = self._aim(arm, now)
        if self.mode == Mode.RELEASED and np.isfinite(arm.q).all():
            self.chain.limiter.begin(arm.q)  # a person moves it, and it is followed
        np.copyto(self._proposed, self._target)
        self.chain.guided = self.mode == Mode.RELEASED
        sent = self.chain(self._target, seen, arm, now)
        if not math.isfinite(self.width):
            self.width = self._sent_width
            self.chain.fault = self.chain.fault or "a command of the hand is not a finite number"
        if self.chain.fault and self.mode != Mode.ESTOP:
            self._stop_for_good(self.chain.fault)
            if self.chain.back is not None:
                sent = self._let_go(self.chain.back, now)
        if self.mode == Mode.STOPPING and self.chain.resting:
            self._come_to_rest(now)
        if self.mode == Mode.HOMING and self.chain.resting and (mover := self._mover) is not None:
            self._end_homing(mover.point, now)
        try:
            self._send(sent, arm)
        except DriverError as error:
            self._connection_lost(error)
            self.driver.halt()

    def _aim(self, arm: ArmState, now: float) -> float:
        """Put the joint target of this tick into `_target`; returns the time (s) of the observation
        that it comes from. An arm that nothing moves is held, and yields."""
        np.copyto(self._target, self.chain.limiter.q)
        mover = self._mover
        if mover is None:
            if self.mode not in (Mode.STOPPING, Mode.RELEASED):
                self._yield(now)
            return now
        if not self._waiting and (problem := self._follow(mover, arm, now)):
            self._stop_for_good(problem)
            return now
        return mover.point.seen

    def _follow(self, source: Source, arm: ArmState, now: float) -> str:
        """Put what `source` wants into `_target` and `width`; why that cannot be done, or ""."""
        began = self.clock()
        source.move(arm, self.chain.limiter.q.copy(), now, self.chain.limiter.slowed)
        if problem := self._problem_of(source):
            return problem
        took = self.clock() - began
        if not took <= self.fresh.config.stop:
            return f"a set-point took {took:.2f} s to make"
        np.copyto(self._target, source.point.q)
        self.width = source.point.width
        return ""

    def _watch_stop(self, now: float) -> None:
        """Give a latched stop up where the arm does not follow it, or is not heard: the robot's own
        controller stops it, once, and the hardware watchdog hears no more of this loop."""
        if self.mode != Mode.ESTOP or self._follows(now):
            self._followed = now
        elif not self._given_up and now - self._followed > GIVE_UP:
            self._given_up = True
            category = self.driver.halt()
            logged(
                f"the arm did not follow its stop for {GIVE_UP:g} s ({self.fault}): its own "
                f"controller stops it now (category {category})"
            )

    def _follows(self, now: float) -> bool:
        """Whether the arm was measured of late, where its set-point is."""
        arm = self.arm
        if arm is None or not abs(now - arm.t) <= self.fresh.config.state:
            return False
        error = np.abs(arm.q - self.chain.limiter.q)
        return bool((error <= np.asarray(self.chain.limiter.limits.tracking)).all())

    @property
    def in_order(self) -> bool:
        return super().in_order and not self._given_up

    def _let_go(self, back: Floats, now: float) -> Floats:
        """Put the set-point at once to `back` [n], where the arm touched nothing; returns it. No
        limit of acceleration holds a set-point that only lets go."""
        limiter = self.chain.limiter
        limiter.begin(np.clip(back + self.droop(back), limiter.low, limiter.high))
        self.yielding.begin(limiter.q, now, moving=True, pause=LET_GO)
        return limiter.q

    def _yield(self, now: float) -> None:
        """Let the set-point of a stopped arm move to where the arm is; then a pending way home
        begins."""
        limiter = self.chain.limiter
        self.chain.aim = self.yielding(limiter.q, limiter.resting, now)
        if self._home_pending and self._yielded and self.homing is not None:
            self._home_pending = False
            self._begin(self.homing, now)
            self.enabled.on = True

    def _end_homing(self, point: SetPoint, now: float) -> None:
        """End the way home of an arm that rests at its last set-point. (One that is held up rests
        elsewhere: then `homing` names a problem.)"""
        if point.last and (np.abs(self.chain.limiter.q - point.q) <= NEAR).all():
            self._come_to_rest(now)
            self.driver.renew()

    def _come_to_rest(self, now: float) -> None:
        """Become idle; the set-point yields once the arm rests as well."""
        self.enabled.on = False
        self.mode = Mode.IDLE
        self.yielding.begin(self.chain.limiter.q, now, moving=False)
        self.yielding.wait(now)

    def _send(self, sent: Floats, arm: ArmState) -> None:
        """Send the joint target `sent` [n] to the driver, unless a person may move the arm, or its
        own controller has stopped it. DriverError."""
        if self._compliant or self._given_up:
            return
        if self.chain.stiffness is not None:
            stiffen(self.driver, self.chain.stiffness)
        self._sent_width = self._limited_width()
        try:
            if self.mode not in (Mode.IDLE, Mode.ESTOP):
                self.driver.write(sent, self._sent_width)
            elif not self.driver.hold(sent, self._sent_width):
                self.chain.begin(arm)  # the arm moves by itself, and the set-point follows it
        finally:
            if self.chain.hand is not None:  # also where the arm takes nothing any more
                self.chain.hand.tell(self.driver)

    def _limited_width(self) -> float:
        """The opening (m) to send the hand to: it moves with the arm, and stops with it."""
        hand = self.chain.hand
        if hand is None:
            return self.width
        if self.mode in (Mode.RUNNING, Mode.HOMING) and not self._waiting:
            return hand.move(self.width, self.driver.width)
        width = hand.stay(self.driver.width, latched=self.mode == Mode.ESTOP)
        if self.mode != Mode.HOMING:  # on the way home it goes on to where it was wanted
            self.width = width
        return width

    def _publish(self, now: float, rate: Rate | None) -> None:
        """Send the state message."""
        self._begin_message(now)
        if self.arm is not None:
            self.writer.measured(self.arm, self.driver.width, self._sensed)
            moves = self.mode == Mode.RUNNING and not self._waiting
            self.writer.followed(self.source.point, moves)
        self.writer.commanded(self._proposed, self.chain, self._sent_width)
        if rate is not None:
            self.writer.timed(rate)
        self.writer.send()

    def connect(self) -> None:
        """Open the wire and hold the arm where it is. DriverError."""
        self.driver.connect()
        self.driver.check(self.chain.limiter.limits)
        self.chain.check(springs_of(self.driver))
        self.arm = self.driver.read()
        if (force := self.chain.stage(Force)) is not None:
            force.require_measured(self.arm)
        self._begin_at_rest(self.arm, self.arm.q)
        self.mode = Mode.IDLE
        self.test_stop()

    def test_stop(self) -> None:
        """Try the stop of an arm at rest, and send it nothing: press the button in shared memory,
        see it latch and a command be refused, and reset. DriverError where one of them fails.

        `Driver.cut` and `Driver.recover` are left out: a drone would be locked by the first."""
        button = self.channels.estop
        counts = self.chain.counts.copy()
        if self.arm is None or button.number != self._stop_number:  # the first tick acts on it
            return
        now = self.clock()
        rest = self.chain.limiter.q.copy()
        self._testing = True
        button.press()
        self._check_emergency_stop(now)
        self._testing = False
        self.enabled.on = True
        sent = self.chain(rest + FAR, now, replace(self.arm, t=now), now)
        moved = bool((np.abs(sent - rest) > 1e-9).any())
        held = self.mode == Mode.ESTOP and bool(self.chain.fault) and not moved
        self.enabled.on = False
        if not held:
            raise DriverError(
                "the stop test failed: a pressed stop did not hold the arm; nothing was moved"
            )
        self._begin_at_rest(self.arm, rest)
        self.chain.clear()
        self.chain.counts[:] = counts
        self.fault = ""
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
        if self.chain.hand is not None:
            self.chain.hand.forget()
        self.chain.begin(replace(arm, q=q))
        self._rest(arm, self.clock())

    def _rest(self, arm: ArmState, now: float) -> None:
        """Hold the set-point; it only yields where the arm presses on something."""
        q = self.chain.limiter.q.copy()
        self.enabled.on = False
        self._home_pending = False
        hand = self.chain.hand
        measured = self.driver.width
        self.width = measured if hand is None else hand.begin(measured)
        self.chain.forget(replace(arm, q=q))
        self.source.begin(q.copy(), self.width, now)
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
        if self.watchdog is not None:
            self.watchdog.wait()
        try:
            self.driver.recover()
            self._hold_released()
            self.arm = self.driver.read()
        except DriverError as error:
            self._connection_lost(error)
            return
        if not np.isfinite(self.arm.q).all():  # where it would continue from
            return
        self.chain.clear()
        self.source.forget()  # what it heard may be of another clock
        stopped = self._connection_failed or self._given_up
        stopped = stopped or (self.internal_error and self.last_resort.stopped)
        self.fault = ""
        self.mode = Mode.IDLE
        self.internal_error = False
        if stopped:  # it was connected anew or stopped by itself, and stands where it is
            self._begin_at_rest(self.arm, self.arm.q + self.droop(self.arm.q))
        else:
            self._rest(self.arm, self.clock())
        self._connection_failed = self._given_up = False

    def _stop_for_good(self, reason: str) -> None:
        """Latch a stop (category 2): the arm comes to rest and yields, until a reset. The first
        reason stays."""
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


class Presence:
    """Reads the beats and tells them to the chain's stages, which hold the arm and latch. A chain
    without these stages needs no beats. Costs 1 us a tick, 5 us where a beat has come."""

    def __init__(self, chain: Chain, channels: KernelChannels) -> None:
        self.channels = channels
        self.daemon = chain.stage(DaemonAlive)
        self.hand = chain.stage(HoldToRun)

    def listen(self, now: float) -> None:
        """Read the newest beats. The daemon's are timed by our clock alone."""
        if self.daemon is not None and self.channels.heartbeat.receive():
            count = int(self.channels.heartbeat.fields["count"][0])
            self.daemon.silence.hear(count, now, now)
        if self.hand is not None and self.channels.deadman.receive():
            beat = self.channels.deadman.fields[0]
            self.hand.silence.hear(int(beat["count"]), float(beat["time"]), now)

    def daemon_speaks(self, now: float) -> bool:
        """Whether an operator could stop an arm that begins to move."""
        return self.daemon is None or self.daemon.speaks(now)

    def waits(self, now: float, moving: bool) -> bool:
        """Whether an arm that moves by itself has to wait. The daemon is watched only while the arm
        is in a mode that moves (`moving`): one that is held is safe without it."""
        if self.daemon is not None:
            self.daemon.watched = moving
        alive = self.daemon is None or not moving or self.daemon.speaks(now)
        held = self.hand is None or self.hand.held(now)
        return not alive or not held
