"""Chunk follower: turns action chunks into a joint target at any time, by the clock.

    seen      start                  now
     |         |a0 |a1 |a2 |a3 |a4 |  a chunk made from the observation at `seen`
     |         |   |b0 |b1 |b2 |b3 |  a newer one: from here on b, blended in over some steps

Each action of a chunk belongs to a time, not to a queue. A chunk that arrives late is entered at
the current time, so inference latency is not played back. A newer chunk takes over in `blend`
steps of growing weight, without a jump (real-time chunking; Black et al., 2025).

While the limit of the tool's speed holds the set-point back, that clock stands still: the arm goes
the same way, slower, and cuts no corners to catch up.

A person who takes over is followed at once and alone. Once they let go, the policy is followed
again from the first chunk on that it made of what it saw after their last action.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from embodied.embodiments.controller import Controller
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.ipc.channels import MOST_NOISE, MOST_STEPS, Channels
from embodied.real_robot.kernel.arm_state import ArmState, Floats
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import Fresh
from embodied.real_robot.kernel.driver import ArmDriver
from embodied.real_robot.kernel.loop import ControlLoop
from embodied.real_robot.kernel.report import Recorder
from embodied.real_robot.kernel.source import SetPoint, Source


@dataclass(slots=True)
class Chunk:
    actions: Floats  # actions [count, A], one a step
    start: float  # time (s) of the first action
    seen: float  # time (s) of the observation that they were made from
    person: bool = False  # whether they are a person's


class ChunkFollower:
    """Steps of `dt` s on a grid of its own from `begin` on; between two steps the joint target
    moves in a straight line. The last action of the newest chunk goes on for up to `grace` steps: a
    policy that decides on every step is always a little late."""

    def __init__(self, controller: Controller, dt: float, blend: int = 2, grace: int = 1) -> None:
        self.controller = controller
        self.dt = dt
        self.blend = blend
        self.grace = grace
        self.chunk: Chunk | None = None
        self.previous: Chunk | None = None
        self.taken_over = False
        self.paused = 0.0  # time (s) for which the clock stood still

    def begin(self, q: Floats, width: float, now: float) -> None:
        """Begin at rest at `q` [n] with the hand `width` m open. The newest chunk stays."""
        self.reference = self.controller.begin(q[None], np.array([width]))
        self.step_start = q.copy()
        self.step_end = q.copy()
        self.width = width
        self.origin = self.last = now
        self.step = -1
        self.steps_taken = 0  # steps since the newest chunk came
        self.starved = True
        self.intervened = False
        self.action = np.zeros(0)

    def forget(self) -> None:
        """Drop all chunks; the next one is followed whatever its times are."""
        self.chunk = self.previous = None
        self.taken_over = False

    def take(self, chunk: Chunk) -> None:
        """Follow `chunk`, unless it was made from an older observation than the last one, or it
        is the policy's while a person has the arm (until `give_back`)."""
        if chunk.person:
            self.taken_over = True
            self.previous = None
            self.chunk = chunk
        elif not self.taken_over and (self.chunk is None or chunk.seen >= self.chunk.seen):
            self.previous = self.chunk
            self.chunk = chunk
            self.steps_taken = 0

    def give_back(self) -> None:
        """Follow the policy's next chunk again, because the person has let go."""
        self.taken_over = False

    @property
    def seen(self) -> float:
        """Time (s) of the observation that the arm follows; minus infinity without a chunk."""
        return -np.inf if self.chunk is None else self.chunk.seen

    def __call__(self, q: Floats, now: float, out: Floats, slowed: bool = False) -> None:
        """Write the joint target [n] for `now` to `out`; `q` [n] is measured. `slowed`: the tool
        was not as fast as it should be, and the time since the call before does not count.

        `starved` says that there is no action for now: the arm then stays where it was sent.
        `intervened`: the action of this step is a person's.
        """
        if slowed:
            self._pause(now - self.last)
        self.last = now
        step = int((now - self.origin) / self.dt)
        if step > self.step:
            self._advance(step, q)
        share = (now - self.origin) / self.dt - step
        np.subtract(self.step_end, self.step_start, out=out)
        out *= min(max(share, 0.0), 1.0)
        out += self.step_start

    def _pause(self, seconds: float) -> None:
        self.paused += seconds
        self.origin += seconds
        for chunk in (self.chunk, self.previous):
            if chunk is not None:
                chunk.start += seconds

    def _advance(self, step: int, q: Floats) -> None:
        """Enter step number `step`: the controller turns its action into the next target."""
        self.step = step
        np.copyto(self.step_start, self.step_end)
        action = self._action(self.origin + (step + 0.5) * self.dt)
        self.starved = action is None
        if action is None:
            return
        self.action = action
        self.steps_taken = self.steps_taken + 1
        self.intervened = self.chunk is not None and self.chunk.person
        if not np.isfinite(action).all():  # for the safety chain to refuse; the reference stays
            self.step_end[:] = np.nan
            return
        joints, width, self.reference = self.controller(action[None], q[None], self.reference)
        np.copyto(self.step_end, joints[0])
        self.width = float(width[0])

    def _action(self, middle: float) -> Floats | None:
        """Action [A] of the step around time `middle` (s), blended with the chunk before."""
        newest = self._action_of(self.chunk, middle, self.grace)
        previous = self._action_of(self.previous, middle, 0)
        if newest is None or previous is None or self.steps_taken >= self.blend:
            return newest
        weight = (self.steps_taken + 1) / (self.blend + 1)
        return weight * newest + (1 - weight) * previous

    def _action_of(self, chunk: Chunk | None, middle: float, grace: int) -> Floats | None:
        """Action [A] of `chunk` for time `middle` (s); None where it has none."""
        if chunk is None:
            return None
        step = max(0.0, (middle - chunk.start) / self.dt)
        count = len(chunk.actions)
        # Compared before it is rounded: a start of long ago is infinitely many steps away.
        return chunk.actions[min(int(step), count - 1)] if step < count + grace else None


class ChunkCheck:
    """Call the object with a CHUNK record and the time (s), or `person` with a PERSON record: the
    answer says in one line why the record cannot be followed, and is empty where it can.

    The policy and the operator's terminal are other processes, and what they write is not trusted.
    Actions themselves are not looked at; the safety chain refuses those that are not finite.

    `names` are the controller's actions. Stamps must not be more than `ahead` s in the future
    (`start`: and a step of `dt` s, since real-time chunking begins on a grid). Stamps of long ago
    are fine here: the chain says what is too old.
    """

    def __init__(self, names: Sequence[str], dt: float, ahead: float) -> None:
        self.names = tuple(names)
        self.dt = dt
        self.ahead = ahead

    def __call__(self, chunk: np.void, now: float) -> str:
        steps, size = int(chunk["steps"]), int(chunk["size"])
        noise = int(chunk["noise_size"])
        if not 1 <= steps <= MOST_STEPS:
            return f"the policy's chunk has {steps} steps; 1 to {MOST_STEPS} are possible"
        if size != len(self.names):
            return self._size("the policy's chunk", size)
        if not 0 <= noise <= MOST_NOISE:
            return f"the policy's chunk has {noise} numbers of noise; 0 to {MOST_NOISE} fit"
        if not np.isfinite(chunk["image_times"]).all():
            return "the policy's chunk has a capture time of an image that is not a finite number"
        return self._stamps("the policy's", "chunk", chunk, now)

    def person(self, record: np.void, now: float) -> str:
        """Why a PERSON record of a person's terminal cannot be followed; empty where it can."""
        if int(record["size"]) != len(self.names):
            return self._size("the person's action", int(record["size"]))
        return self._stamps("the person's", "action", record, now)

    def _size(self, what: str, size: int) -> str:
        return f"{what} has {size} numbers for {len(self.names)} actions ({', '.join(self.names)})"

    def _stamps(self, whose: str, what: str, record: np.void, now: float) -> str:
        seen, start = float(record["seen"]), float(record["start"])
        for name, value in (("seen", seen), ("start", start)):
            if not math.isfinite(value):
                return f"{whose} {what} has {name}={value}, which is not a time in s"
        if seen > now + self.ahead:
            return f"{whose} observation is {seen - now:.3f} s from the future"
        if start > now + self.ahead + self.dt:
            return f"{whose} {what} starts {start - now:.3f} s from now, in the future"
        return ""


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


def control_loop(
    driver: ArmDriver,
    chain: Chain,
    follower: ChunkFollower,
    channels: Channels,
    clock: Callable[[], float] = time.monotonic,
    ring: Recorder | None = None,
    homing: Homing | None = None,
) -> ControlLoop:
    """A control loop that follows what comes through `channels`; nothing is connected yet."""
    source = PolicySource(follower, channels, chain.required(Fresh).config.state)
    return ControlLoop(driver, chain, source, channels, clock, ring, homing)
