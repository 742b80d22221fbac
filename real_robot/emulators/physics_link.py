"""The emulator's side of its process: settings in, reply out, and pacing of simulation steps."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from embodied.core.build import parse

S = TypeVar("S")


def settings(kind: type[S]) -> S:
    """The dataclass `kind`, from the first line of standard input."""
    return parse(kind, json.loads(sys.stdin.readline()), "emulator")


def answer(
    said: dict[str, Any],
    behind: Callable[[], float] = lambda: 0.0,
    over: threading.Event | None = None,
) -> None:
    """Tell `said`, and then to every line of standard input how far `behind` real time its world is
    (s), until the input ends: that is `over`."""
    try:
        print(json.dumps(said), flush=True)
        while os.read(0, 256):  # not sys.stdin: a thread in it would spoil the process's last words
            print(json.dumps({"behind": behind()}), flush=True)
    finally:
        if over is not None:
            over.set()


class Pace:
    """When the next step of `step` s is `due` (s, monotonic). Up to `most` s are caught up with;
    the world goes on later by the rest."""

    def __init__(self, step: float, most: float = math.inf) -> None:
        self.step, self.most = step, most
        self.due, self.lost = time.monotonic(), 0.0

    def next(self) -> float:
        """After a step: s until the next one."""
        now = time.monotonic()
        self.due += self.step
        late = max(0.0, now - self.due - self.most)
        self.due, self.lost = self.due + late, self.lost + late
        return max(0.0, self.due - now)

    def behind(self) -> float:
        """s that this world has lost so far."""
        return self.lost + max(0.0, time.monotonic() - self.due)
