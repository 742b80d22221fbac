"""Set-points of a policy's chunks, and of a person who takes over from it."""

from __future__ import annotations

import numpy as np

from embodied.real_robot.control.chunk_follower import Chunk, ChunkCheck, ChunkFollower
from embodied.real_robot.ipc.channels import Channels
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.source import SetPoint, Source


class PolicySource(Source):
    """Gives the newest chunks of the policy process, and the actions of an operator's terminal, to
    the `follower`. Stamps may be `ahead` s in the future."""

    def __init__(self, follower: ChunkFollower, channels: Channels, ahead: float) -> None:
        self.follower = follower
        self.channels = channels
        self.check = ChunkCheck(follower.controller.names, follower.dt, ahead)
        self.point = SetPoint(np.zeros(0))

    def listen(self, now: float) -> None:
        """`point.problem`: why a record that came just now cannot be followed; it is dropped."""
        self.point.problem = ""
        if self.channels.chunk.receive():
            self._receive_chunk(now)
        if self.channels.takeover.receive():
            self._receive_person(now)
        self.point.seen = self.follower.seen

    def begin(self, q: Floats, width: float, now: float) -> None:
        self.follower.begin(q, width, now)
        self.point = SetPoint(q.copy(), width, self.follower.seen)

    def move(self, arm: ArmState, sent: Floats, now: float, slowed: bool) -> None:
        follower, point = self.follower, self.point
        follower(arm.q, now, point.q, slowed)
        point.width = follower.width
        point.seen = follower.seen
        point.starved = follower.starved
        point.step = follower.step
        point.action = follower.action
        point.intervened = follower.intervened
        point.reference = follower.step_end
        point.paused = follower.paused

    def forget(self) -> None:
        self.follower.forget()
        self.point.seen = self.follower.seen

    def _receive_chunk(self, now: float) -> None:
        fields = self.channels.chunk.fields[0]
        if problem := self.check(fields, now):
            self.point.problem = problem
            return
        actions = fields["actions"][: fields["steps"], : fields["size"]].astype(np.float64)
        self.follower.take(Chunk(actions, float(fields["start"]), float(fields["seen"])))

    def _receive_person(self, now: float) -> None:
        """Give a person's newest action to the follower, or the arm back to the policy."""
        fields = self.channels.takeover.fields[0]
        if not fields["over"]:
            self.follower.give_back()
            return
        if problem := self.check.person(fields, now):
            self.point.problem = self.point.problem or problem
            return
        action = fields["action"][None, : fields["size"]].astype(np.float64)
        seen, start = float(fields["seen"]), float(fields["start"])
        self.follower.take(Chunk(action, start, seen, person=True))
