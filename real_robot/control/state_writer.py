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
        fields["sent"] = sent

    def measured(self, arm: ArmState, width: float, sensed: Floats) -> None:
        """Note what the driver measured."""
        fields = self.state.fields
        fields["measured"] = arm.t
        fields["width"] = width
        fields["sensed"] = sensed
        fields["q"] = arm.q
        fields["dq"] = arm.dq
        fields["tau"] = arm.tau

    def followed(self, follower: ChunkFollower) -> None:
        """Note which action of which chunk is followed."""
        fields, size = self.state.fields[0], min(len(follower.action), MOST_ACTION)
        fields["step"] = follower.step
        fields["followed"] = follower.seen
        fields["size"] = size
        fields["action"][:size] = follower.action[:size]
        fields["intervened"] = follower.intervened

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
