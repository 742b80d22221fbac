"""Chunk follower: turns action chunks into a joint target at any time, by the clock.

    seen      start                  now
     |         |a0 |a1 |a2 |a3 |a4 |  a chunk made from the observation at `seen`
     |         |   |b0 |b1 |b2 |b3 |  a newer one: from here on b, blended in over some steps

Each action of a chunk belongs to a time, not to a queue. A chunk that arrives late is entered at
the current time, so inference latency is not played back. A newer chunk takes over in `blend`
steps of growing weight, without a jump (real-time chunking; Black et al., 2025).

A person who takes over is followed at once and alone. Once they let go, the policy is followed
again from the first chunk on that it made of what it saw after their last action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.embodiments.controller import Controller
from embodied.real_robot.control.arm_state import Floats


@dataclass(slots=True)
class Chunk:
    """`actions` [count, A]; the first is for `start` (s), made from what was seen at `seen` (s).
    `person`: they are a person's, who has taken over."""

    actions: Floats
    start: float
    seen: float
    person: bool = False


class ChunkFollower:
    """Steps of `dt` s on a grid of its own from `begin` on; between two steps the joint target
    moves in a straight line. The last action of a chunk goes on for up to `grace` steps: a policy
    that decides on every step is always a little late."""

    def __init__(self, controller: Controller, dt: float, blend: int = 2, grace: int = 1) -> None:
        self.controller, self.dt, self.blend, self.grace = controller, dt, blend, grace
        self.chunk: Chunk | None = None
        self.old: Chunk | None = None
        self.taken_over = False

    def begin(self, q: Floats, width: float, now: float) -> None:
        """From rest at `q` [n] with the hand `width` m open; chunks that are there stay."""
        self.reference = self.controller.begin(q[None], np.array([width]))
        self.before, self.after = q.copy(), q.copy()
        self.width = width
        self.origin, self.step = now, -1
        self.taken = 0  # steps since the newest chunk came
        self.starved, self.intervened = True, False
        self.action = np.zeros(0)

    def forget(self) -> None:
        """What was said so far; the next chunk is followed whatever its times are."""
        self.chunk = self.old = None
        self.taken_over = False

    def take(self, chunk: Chunk) -> None:
        """A newer chunk; one that was made from something older than the last is not followed, nor
        a policy's while a person has the arm (until `give_back`)."""
        if chunk.person:
            self.taken_over, self.old, self.chunk = True, None, chunk
        elif not self.taken_over and (self.chunk is None or chunk.seen >= self.chunk.seen):
            self.old, self.chunk, self.taken = self.chunk, chunk, 0

    def give_back(self) -> None:
        """The person has let go: the policy's next chunk is followed."""
        self.taken_over = False

    @property
    def seen(self) -> float:
        """When what the arm follows was seen (s); minus infinity while there is nothing."""
        return -np.inf if self.chunk is None else self.chunk.seen

    def __call__(self, q: Floats, now: float, out: Floats) -> None:
        """Write the joint target [n] for `now` to `out`; `q` [n] is measured.

        `starved` says that there is no action for now: the arm then stays where it was sent.
        `intervened`: the action of this step is a person's.
        """
        step = int((now - self.origin) / self.dt)
        if step > self.step:
            self._advance(step, q)
        share = (now - self.origin) / self.dt - step
        np.subtract(self.after, self.before, out=out)
        out *= min(max(share, 0.0), 1.0)
        out += self.before

    def _advance(self, step: int, q: Floats) -> None:
        """Enter step number `step`: the controller turns its action into the next target."""
        self.step = step
        np.copyto(self.before, self.after)
        action = self._action(self.origin + (step + 0.5) * self.dt)
        self.starved = action is None
        if action is None:
            return
        self.action, self.taken = action, self.taken + 1
        self.intervened = self.chunk is not None and self.chunk.person
        if not np.isfinite(action).all():  # for the safety chain to refuse; the reference stays
            self.after[:] = np.nan
            return
        joints, width, self.reference = self.controller(action[None], q[None], self.reference)
        np.copyto(self.after, joints[0])
        self.width = float(width[0])

    def _action(self, middle: float) -> Floats | None:
        """Of the step around time `middle`: the newest chunk's, blended with the one before."""
        new = self._of(self.chunk, middle)
        old = self._of(self.old, middle)
        if new is None or old is None or self.taken >= self.blend:
            return new
        weight = (self.taken + 1) / (self.blend + 1)
        return weight * new + (1 - weight) * old

    def _of(self, chunk: Chunk | None, middle: float) -> Floats | None:
        if chunk is None:
            return None
        at, count = max(0.0, (middle - chunk.start) / self.dt), len(chunk.actions)
        # Compared before it is rounded: a start of long ago is infinitely many steps away.
        return chunk.actions[min(int(at), count - 1)] if at < count + self.grace else None
