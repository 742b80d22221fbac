"""Validity of an action chunk, checked where the control process receives it.

The policy is another process, and what it writes is not trusted: a record that is refused here
never reaches the follower. Actions themselves are not looked at; the safety chain refuses those
that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from real_robot.ipc.messages import MOST_NOISE, MOST_STEPS


class ChunkCheck:
    """Call it with a CHUNK record and the time (s); the answer is why the record cannot be followed
    in one line, empty where it can.

    `names` are the controller's actions. Stamps must not be more than `ahead` s in the future
    (`start`: and a step of `dt` s, since real-time chunking begins on a grid). Stamps of long ago
    are fine here: the chain says what is too old. Costs 8 us a chunk.
    """

    def __init__(self, names: Sequence[str], dt: float, ahead: float) -> None:
        self.names, self.dt, self.ahead = tuple(names), dt, ahead

    def __call__(self, chunk: np.void, now: float) -> str:
        steps, size = int(chunk["steps"]), int(chunk["size"])
        noise = int(chunk["noise_size"])
        if not 1 <= steps <= MOST_STEPS:
            return f"the policy's chunk has {steps} steps; 1 to {MOST_STEPS} are possible"
        if size != len(self.names):
            actions = f"{len(self.names)} actions ({', '.join(self.names)})"
            return f"the policy's chunk has {size} numbers for {actions}"
        if not 0 <= noise <= MOST_NOISE:
            return f"the policy's chunk has {noise} numbers of noise; 0 to {MOST_NOISE} fit"
        if not np.isfinite(chunk["image_times"]).all():
            return "the policy's chunk has a capture time of an image that is not a finite number"
        return self._stamp("seen", float(chunk["seen"]), now + self.ahead, now) or self._stamp(
            "start", float(chunk["start"]), now + self.ahead + self.dt, now
        )

    def _stamp(self, name: str, value: float, latest: float, now: float) -> str:
        if not math.isfinite(value):
            return f"the policy's chunk has {name}={value}, which is not a time in s"
        if value <= latest:
            return ""
        if name == "seen":
            return f"the policy's observation is {value - now:.3f} s from the future"
        return f"the policy's chunk starts {value - now:.3f} s from now, in the future"
