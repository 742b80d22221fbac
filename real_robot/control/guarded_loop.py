"""A loop that goes on whatever one of its ticks raises, with a stop button of its own.

An error in a tick is a latched fault. From then on, until an operator resets, nothing is run but
braking (`LastResort`), the operator's requests and the state message.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from embodied.real_robot.control.arm_state import ArmState
from embodied.real_robot.control.episode import Episode
from embodied.real_robot.control.last_resort import LastResort
from embodied.real_robot.control.rate import Rate
from embodied.real_robot.control.state_writer import StateWriter
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.ipc.messages import Command, Mode
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.safety.chain import Chain
from embodied.real_robot.safety.checks import Enabled

COMMANDS = frozenset(Command)


class GuardedLoop(ABC):
    """`turn` is one tick, which `_turn` defines; `run` calls it at a rate."""

    def __init__(
        self,
        driver: Driver,
        chain: Chain,
        channels: Channels,
        clock: Callable[[], float] = time.monotonic,
        ring: BlackBox | None = None,
    ) -> None:
        self.driver, self.chain, self.channels, self.clock = driver, chain, channels, clock
        self.writer, self.episode = StateWriter(channels.state, ring), Episode()
        self.enabled = chain.required(Enabled)
        self.last_resort, self.broken = LastResort(driver, chain.limiter), False
        self.mode, self.fault, self.quit = Mode.DISCONNECTED, "", False
        self.leave = ""
        """Why to come to rest and then quit; a signal or another thread may set it."""
        self.arm: ArmState | None = None
        self.width = 0.0
        self._pressed = 0  # which press of the emergency stop was acted on

    @abstractmethod
    def _turn(self, now: float, rate: Rate | None) -> None:
        """One tick."""

    @abstractmethod
    def _apply(self, command: Command, now: float) -> bool:
        """Whether that could be done in this mode."""

    @property
    def resting(self) -> bool:
        """Whether what is sent no longer moves."""
        return self.last_resort.resting if self.broken else self.chain.resting

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
        """One tick. Whatever it raises is a latched fault, and the arm is braked."""
        now = self.clock()
        try:
            self.last_resort.mark()
            if self.broken:
                self._broken_turn(now)
            else:
                self._turn(now, rate)
        except Exception as error:
            self._internal_error(error)
            self._brake_and_publish(now)

    def _check_emergency_stop(self, now: float) -> None:
        """Pressed without the daemon, in any mode; only a reset puts it back."""
        number = self.channels.estop.number
        if number != self._pressed:
            self._pressed = number
            if number:
                self._apply(Command.ESTOP, now)

    def _handle_request(self, now: float) -> None:
        request = self.channels.request.fields
        number, command = int(request["number"][0]), int(request["command"][0])
        self.writer.explain("")
        done = command in COMMANDS and self._apply(Command(command), now)
        self.writer.answer(number, done)

    def _internal_error(self, error: Exception) -> None:
        """Latched without a call of what may have raised."""
        released = self.mode == Mode.RELEASED
        reason = self.last_resort.begin(error, self.arm, released)
        self.chain.fault, self.fault = self.chain.fault or reason, self.fault or reason
        self.enabled.on, self.mode, self.broken = False, Mode.ESTOP, True
        self.writer.refuse_unanswered(int(self.channels.request.fields["number"][0]))

    def _broken_turn(self, now: float) -> None:
        """After an internal error: nothing but braking, the operator's requests and the state."""
        self._check_emergency_stop(now)
        if self.channels.request.receive():
            self._handle_request(now)
        self.quit = self.quit or bool(self.leave and self.resting)
        self._brake_and_publish(now)

    def _brake_and_publish(self, now: float) -> None:
        if self.broken:
            self.last_resort.brake(self.width)
        self._begin_message(now)
        self.writer.send()

    def _begin_message(self, now: float) -> None:
        self.episode.watch(self.mode)
        self.writer.begin(now, self.mode, self.fault, self.episode.ended, self.chain.limiter.q)
