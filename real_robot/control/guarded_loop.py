"""A control loop that continues whatever one of its ticks raises.

An error in a tick is a latched fault. Until an operator resets it, the loop runs only braking
(`LastResort`), the operator's requests and the state message.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from embodied.real_robot.control.chunk_follower import ChunkFollower
from embodied.real_robot.drivers.driver import Driver, DriverError, droop_of
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import Enabled
from embodied.real_robot.kernel.hand import REST_FORCE, HandLimiter
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import MOST_ACTION, TEXT, Command, Ended, Mode
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.watchdog.client import Watchdog


class LastResort:
    """Braking after an error in the control loop itself, by as little code as possible.

    A part of the loop raised: a controller with a mistake, a driver that returned the wrong shape,
    a motion planner that failed. None of them is run again before an operator resets. The commanded
    motion goes to where the arm was measured last, within its limits, so that the arm does not
    press on (stop category 2). Call `mark` at the beginning of every tick (0.5 us), `begin` after
    an error, then `brake` once a tick."""

    def __init__(self, driver: Driver, limiter: Limiter, hand: HandLimiter | None = None) -> None:
        self.driver = driver
        self.limiter = limiter
        self.hand = hand
        self.stopped = False
        """Whether braking failed as well and the driver was told to stop; it is sent nothing."""
        self._sent = limiter.q.copy()
        self._aim: Floats | None = None

    def mark(self) -> None:
        """Remember the set-point that was sent last, to know whether this tick has already moved
        it."""
        np.copyto(self._sent, self.limiter.q)

    @property
    def resting(self) -> bool:
        return self.stopped or self.limiter.resting

    def begin(self, error: Exception, arm: ArmState | None, released: bool) -> str:
        """Begin to brake after `error`; returns the fault to latch, which is logged as well.

        `arm` is the newest measurement. An arm that was `released` is held again. Never raises."""
        self.stopped = False
        self._aim = self._measured(arm)
        try:
            if released:
                self.driver.engage()
        except Exception as another:
            self._give_up(another)
        return logged(describe(error))

    def brake(self, width: float) -> None:
        """Send one tick of braking; where that fails as well, let the robot's own controller stop
        it. Never raises."""
        if self.stopped:
            return
        try:
            # Two steps in one tick would be twice the speed.
            moved = bool((self.limiter.q != self._sent).any())
            q = self.limiter.q if moved else self._step()
            self.driver.hold(q, width if self.hand is None else self._width(self.hand))
            if self.hand is not None:
                self.hand.tell(self.driver)
        except Exception as error:
            self._give_up(error)

    def _width(self, hand: HandLimiter) -> float:
        """The opening (m) of a hand that does what it does at a latched stop. Nothing is measured:
        what it holds may be gone, and it presses no harder than with nothing."""
        with contextlib.suppress(Exception):
            hand.stay(self.driver.width, latched=True)
        hand.force = min(hand.force, REST_FORCE)
        return hand.width

    def _give_up(self, error: Exception) -> None:
        """Let the robot's own controller stop it, and send nothing more."""
        self.stopped = True
        logged(f"braking failed as well: {describe(error)}")
        with contextlib.suppress(Exception):
            self.driver.halt()

    def _measured(self, arm: ArmState | None) -> Floats | None:
        """The set-point [n] that holds the arm where it was measured; None where that is not
        known, and the arm is only braked."""
        try:
            assert arm is not None
            aim = np.add(arm.q, droop_of(self.driver)(arm.q))
            return aim if aim.shape == self.limiter.q.shape and np.isfinite(aim).all() else None
        except Exception:
            return None

    def _step(self) -> Floats:
        """The next set-point [n] on the way to rest."""
        try:
            return self.limiter.brake() if self._aim is None else self.limiter.unguarded(self._aim)
        except Exception:
            self._aim = None
            return self.limiter.brake()


def describe(error: Exception) -> str:
    """One line about `error`: its type, its message and the line that raised it."""
    if isinstance(error, DriverError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    said = " ".join(str(error).split())[: TEXT - 100]
    return f"internal error in the control loop: {type(error).__name__}: {said}{place}"


def logged(line: str) -> str:
    """Print `line` to the log, and return it."""
    with contextlib.suppress(OSError):  # a full disk
        print(line, file=sys.stderr, flush=True)
    return line


COMMANDS = frozenset(Command)


class GuardedLoop(ABC):
    """`turn` is one tick, which `_turn` defines. `run` calls it at a rate."""

    def __init__(
        self,
        driver: Driver,
        chain: Chain,
        channels: Channels,
        clock: Callable[[], float] = time.monotonic,
        ring: BlackBox | None = None,
    ) -> None:
        self.driver = driver
        self.chain = chain
        self.channels = channels
        self.clock = clock
        self.writer = StateWriter(channels.state, ring)
        self.episode = Episode()
        self.enabled = chain.required(Enabled)
        self.last_resort = LastResort(driver, chain.limiter, chain.hand)
        self.internal_error = False
        """Whether a tick raised, and no operator has reset that yet."""
        self.mode = Mode.DISCONNECTED
        self.fault = ""
        self.quit = False
        self.quit_reason = ""
        """Reason to come to rest and then quit; a signal or another thread may set it."""
        self.arm: ArmState | None = None
        self.width = 0.0
        """Opening (m) that is wanted of the hand."""
        self.watchdog: Watchdog | None = None
        """The hardware watchdog, connected; None: there is none."""
        self._stop_number = 0  # of the newest press of the emergency stop that was acted on

    @abstractmethod
    def _turn(self, now: float, rate: Rate | None) -> None:
        """Run one tick at `now` (s)."""

    @abstractmethod
    def _apply(self, command: Command, now: float) -> bool:
        """Do what an operator asks; False where this mode does not allow it."""

    @property
    def resting(self) -> bool:
        """Whether what is sent no longer moves."""
        return self.last_resort.resting if self.internal_error else self.chain.resting

    @property
    def in_order(self) -> bool:
        """Whether this loop may keep the hardware watchdog's relay closed."""
        return not self.internal_error

    def run(self, rate: Rate) -> None:
        """Run ticks until an operator quits. The garbage collector is off meanwhile, because ticks
        make no cycles."""
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
        """Run one tick. Whatever it raises is a latched fault, and the arm is braked."""
        now = self.clock()
        try:
            self.last_resort.mark()
            if self.internal_error:
                self._turn_after_error(now)
            else:
                self._turn(now, rate)
        except Exception as error:
            self._latch_internal_error(error)
            self._brake_and_publish(now)
        if self.watchdog is not None and self.in_order:
            self.watchdog.beat()

    def _check_emergency_stop(self, now: float) -> None:
        """Act on an emergency stop that was pressed without the daemon; only a reset releases
        it."""
        number = self.channels.estop.number
        if number != self._stop_number:
            self._stop_number = number
            if number:
                self._apply(Command.ESTOP, now)

    def _handle_request(self, now: float) -> None:
        """Do or refuse the newest request, and answer it."""
        request = self.channels.request.fields
        number, command = int(request["number"][0]), int(request["command"][0])
        self.writer.explain("")
        done = command in COMMANDS and self._apply(Command(command), now)
        self.writer.answer(number, done)

    def _latch_internal_error(self, error: Exception) -> None:
        """Latch an error of a tick, without a call of what may have raised it."""
        reason = self.last_resort.begin(error, self.arm, self.mode == Mode.RELEASED)
        self.chain.fault = self.chain.fault or reason
        self.fault = self.fault or reason
        self.enabled.on = False
        self.mode = Mode.ESTOP
        self.internal_error = True
        self.writer.refuse_unanswered(int(self.channels.request.fields["number"][0]))

    def _turn_after_error(self, now: float) -> None:
        """Run one tick after an internal error: braking, the operator's requests, the state."""
        self._check_emergency_stop(now)
        if self.channels.request.receive():
            self._handle_request(now)
        self.quit = self.quit or bool(self.quit_reason and self.resting)
        self._brake_and_publish(now)

    def _brake_and_publish(self, now: float) -> None:
        """Brake after an internal error, and send the state message."""
        if self.internal_error:
            self.last_resort.brake(self.width)
        self._begin_message(now)
        self.writer.send()

    def _begin_message(self, now: float) -> None:
        """Begin the state message of this tick."""
        self.episode.watch(self.mode)
        self.writer.begin(now, self.mode, self.fault, self.episode.ended, self.chain.limiter.q)


class Episode:
    """An episode runs from START until the arm leaves RUNNING. The control process keeps its time
    limit itself: a terminal or a daemon that hangs must not make it longer."""

    def __init__(self) -> None:
        self.ended = Ended.NOTHING
        self._until = math.inf
        self._runs = False

    @staticmethod
    def possible(seconds: float) -> bool:
        """Whether `seconds` can be a time limit (0: none)."""
        return 0 <= seconds < math.inf

    def begin(self, seconds: float, now: float) -> None:
        """Begin an episode at `now` (s) that lasts at most `seconds` (0: no limit)."""
        self.ended = Ended.NOTHING
        self._until = now + seconds if seconds else math.inf
        self._runs = True

    def over(self, now: float) -> bool:
        """Whether it has run for as long as it may; `ended` then says so."""
        if not self._runs or now < self._until:
            return False
        self._runs = False
        self.ended = Ended.TIME
        return True

    def watch(self, mode: Mode) -> None:
        """Note the mode after a tick: an episode that left RUNNING before its time was stopped."""
        if self._runs and mode != Mode.RUNNING:
            self._runs = False
            self.ended = Ended.FAULT if mode == Mode.ESTOP else Ended.STOPPED


class StateWriter:
    """Call `begin`, the methods for what is known in this tick, then `send`. Other fields stay."""

    def __init__(self, state: Mailbox, ring: BlackBox | None) -> None:
        self.state = state
        self.ring = ring
        self.ticks = 0

    def begin(self, now: float, mode: Mode, fault: str, ended: Ended, sent: Floats) -> None:
        """Begin the message of a tick at `now` (s), in which the arm was sent `sent` [n]."""
        fields = self.state.fields
        self.ticks += 1
        fields["tick"] = self.ticks
        fields["now"] = now
        fields["mode"] = mode
        fields["fault"] = fault.encode()
        fields["ended"] = ended
        fields["sent"] = fields["reference"] = sent

    def measured(self, arm: ArmState, width: float, sensed: Floats) -> None:
        """Note what the driver measured."""
        fields = self.state.fields
        fields["measured"] = arm.t
        fields["width"] = width
        fields["sensed"] = sensed
        fields["q"] = arm.q
        fields["dq"] = arm.dq
        fields["tau"] = arm.tau

    def followed(self, follower: ChunkFollower, moves: bool) -> None:
        """Note which action of which chunk is followed, and where it leads the arm (if it
        `moves`)."""
        fields, size = self.state.fields[0], min(len(follower.action), MOST_ACTION)
        fields["step"] = follower.step
        fields["followed"] = follower.seen
        fields["size"] = size
        fields["action"][:size] = follower.action[:size]
        fields["intervened"] = follower.intervened
        fields["paused"] = follower.paused
        if moves:
            fields["reference"] = follower.step_end

    def commanded(self, proposed: Floats, chain: Chain, width: float, starved: bool) -> None:
        """Note the target `proposed` [n] and what the chain made of it."""
        fields = self.state.fields
        fields["proposed"], fields["filtered"] = proposed, chain.limiter.wanted
        fields["changed"], fields["counts"] = chain.changed, chain.counts
        fields["sent_width"], fields["starved"] = width, starved

    def timed(self, rate: Rate) -> None:
        """Note how punctual the loop is."""
        fields = self.state.fields
        fields["missed"] = rate.missed
        fields["late"] = rate.late
        fields["worst"] = rate.worst

    def answer(self, number: int, done: bool) -> None:
        """Answer that request `number` was done, or refused."""
        self.state.fields["answered" if done else "refused"] = number

    def explain(self, reason: str) -> None:
        """Say in one line why the request is refused; "": the mode is the reason."""
        self.state.fields["reason"] = reason.encode()[:TEXT]

    def refuse_unanswered(self, number: int) -> None:
        """Refuse request `number`, unless it has its answer."""
        fields = self.state.fields[0]
        if number not in (int(fields["answered"]), int(fields["refused"])):
            self.answer(number, False)

    def send(self) -> None:
        """Publish the message."""
        self.state.send()
        if self.ring is not None:
            self.ring.add(self.state.fields)
