"""What the kernel reports: how the newest episode ended, and the state message of every tick."""

from __future__ import annotations

import math
from typing import Any, Protocol

from numpy.typing import NDArray

from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import MOST_ACTION, TEXT, Ended, Mode
from embodied.real_robot.kernel.rate import Rate
from embodied.real_robot.kernel.source import SetPoint


class Recorder(Protocol):
    """Keeps the state messages of the last seconds."""

    def add(self, record: NDArray[Any]) -> None:
        """Keep `record` [1]; never waits."""
        ...


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

    def __init__(self, state: Mailbox, ring: Recorder | None) -> None:
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

    def followed(self, point: SetPoint, moves: bool) -> None:
        """Note what a policy's source follows, and where it leads the arm (if it `moves`)."""
        fields, size = self.state.fields[0], min(len(point.action), MOST_ACTION)
        fields["step"] = point.step
        fields["followed"] = point.seen
        fields["size"] = size
        fields["action"][:size] = point.action[:size]
        fields["intervened"] = point.intervened
        fields["starved"] = point.starved
        fields["paused"] = point.paused
        if moves:
            fields["reference"] = point.q if point.reference is None else point.reference

    def commanded(self, proposed: Floats, chain: Chain, width: float) -> None:
        """Note the target `proposed` [n] and what the chain made of it."""
        fields = self.state.fields
        fields["proposed"], fields["filtered"] = proposed, chain.limiter.wanted
        fields["changed"], fields["counts"] = chain.changed, chain.counts
        fields["sent_width"] = width

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
