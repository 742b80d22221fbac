"""A control loop that continues whatever one of its ticks raises.

An error in a tick is a latched fault. Until an operator resets it, the loop runs only braking
(`LastResort`), the operator's requests and the state message.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from embodied.real_robot.kernel.arm_state import ArmState
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.channels import KernelChannels
from embodied.real_robot.kernel.checks import Enabled
from embodied.real_robot.kernel.driver import ArmDriver
from embodied.real_robot.kernel.last_resort import LastResort
from embodied.real_robot.kernel.messages import Command, Mode
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.kernel.report import Episode, Recorder, StateWriter

COMMANDS = frozenset(Command)


class Watchdog(Protocol):
    """A hardware watchdog, connected: it stops the robot where this loop does not beat."""

    @property
    def fault(self) -> str:
        """Why it has stopped the robot; empty: it has not."""
        ...

    def beat(self) -> None:
        """Everything is in order in this tick."""
        ...

    def wait(self) -> None:
        """Wait until it lets the robot move. DriverError."""
        ...


class GuardedLoop(ABC):
    """`turn` is one tick, which `_turn` defines. `run` calls it at a rate."""

    def __init__(
        self,
        driver: ArmDriver,
        chain: Chain,
        channels: KernelChannels,
        clock: Callable[[], float] = time.monotonic,
        ring: Recorder | None = None,
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
