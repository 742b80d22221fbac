"""Writes the control process's state message, and the flight record with it, in every tick."""

from __future__ import annotations

from embodied.real_robot.control.arm_state import ArmState, Floats
from embodied.real_robot.control.chunk_follower import ChunkFollower
from embodied.real_robot.control.rate import Rate
from embodied.real_robot.ipc.mailbox import Mailbox
from embodied.real_robot.ipc.messages import MOST_ACTION, TEXT, Ended, Mode
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.safety.chain import Chain


class StateWriter:
    """`begin`, then what is known in this tick, then `send`. What is not told stays as it was."""

    def __init__(self, state: Mailbox, ring: BlackBox | None) -> None:
        self.state, self.ring, self.ticks = state, ring, 0

    def begin(self, now: float, mode: Mode, fault: str, ended: Ended, sent: Floats) -> None:
        """Another tick, at `now` (s), in which `sent` [n] is what the arm was sent."""
        fields = self.state.fields
        self.ticks += 1
        fields["tick"], fields["now"], fields["mode"] = self.ticks, now, mode
        fields["fault"], fields["ended"], fields["sent"] = fault.encode(), ended, sent

    def measured(self, arm: ArmState, width: float, sensed: Floats) -> None:
        """What the driver measured."""
        fields = self.state.fields
        fields["measured"], fields["width"], fields["sensed"] = arm.t, width, sensed
        fields["q"], fields["dq"], fields["tau"] = arm.q, arm.dq, arm.tau

    def followed(self, follower: ChunkFollower) -> None:
        """Which action of which chunk."""
        fields, size = self.state.fields[0], min(len(follower.action), MOST_ACTION)
        fields["step"], fields["followed"], fields["size"] = follower.step, follower.seen, size
        fields["action"][:size] = follower.action[:size]
        fields["intervened"] = follower.intervened

    def commanded(self, proposed: Floats, chain: Chain, width: float, starved: bool) -> None:
        """What was wanted and what the chain made of it."""
        fields = self.state.fields
        fields["proposed"], fields["filtered"] = proposed, chain.limiter.wanted
        fields["changed"], fields["counts"] = chain.changed, chain.counts
        fields["sent_width"], fields["starved"] = width, starved

    def timed(self, rate: Rate) -> None:
        """How punctual the loop is."""
        fields = self.state.fields
        fields["missed"], fields["late"], fields["worst"] = rate.missed, rate.late, rate.worst

    def answer(self, number: int, done: bool) -> None:
        """Request `number` was done, or not."""
        self.state.fields["answered" if done else "refused"] = number

    def explain(self, reason: str) -> None:
        """Why the request at hand is refused, in one line; "": its mode says it."""
        self.state.fields["reason"] = reason.encode()[:TEXT]

    def refuse_unanswered(self, number: int) -> None:
        """Request `number` was not done, unless it has its answer."""
        fields = self.state.fields[0]
        if number not in (int(fields["answered"]), int(fields["refused"])):
            self.answer(number, False)

    def send(self) -> None:
        """Publish it."""
        self.state.send()
        if self.ring is not None:
            self.ring.add(self.state.fields)
