"""Validity of actions, checked where the control process receives them.

The policy and the operator's terminal are other processes, and what they write is not trusted: a
record that is refused here never reaches the follower. Actions themselves are not looked at; the
safety chain refuses those that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from embodied.real_robot.ipc.messages import MOST_NOISE, MOST_STEPS


class ChunkCheck:
    """Call the object with a CHUNK record and the time (s), or `person` with a PERSON record: the
    answer says in one line why the record cannot be followed, and is empty where it can.

    `names` are the controller's actions. Stamps must not be more than `ahead` s in the future
    (`start`: and a step of `dt` s, since real-time chunking begins on a grid). Stamps of long ago
    are fine here: the chain says what is too old. Costs 8 us a chunk.
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
