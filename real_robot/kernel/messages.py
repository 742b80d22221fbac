"""Messages from and to the kernel: fixed records of numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

VERSION = 8
DEADMAN = "deadman"
"""The mailbox of hold-to-run: a HEARTBEAT of the operator's terminal."""
MOST_ACTION = 32
"""Numbers of an action."""
TEXT = 240
"""Bytes of a text."""


class Mode(IntEnum):
    """Modes of the control process. Only an operator's reset leaves ESTOP."""

    DISCONNECTED = 0
    IDLE = 1
    ARMED = 2
    RUNNING = 3
    STOPPING = 4
    ESTOP = 5
    HOMING = 6
    RELEASED = 7


PRESSED_AGAIN = "the emergency stop was pressed again: look, then reset once more"
"""Why a reset is refused."""


class Ended(IntEnum):
    """Why the newest episode ended; NOTHING before the first and while one runs."""

    NOTHING = 0
    STOPPED = 1
    TIME = 2
    FAULT = 3


class Command(IntEnum):
    """An operator's command."""

    NOTHING = 0
    ARM = 1
    START = 2
    STOP = 3
    ESTOP = 4
    RESET = 5
    QUIT = 6
    HOME = 7
    RELEASE = 8
    RELEASE_SUPPORTED = 9  # a person holds an arm that falls


def state_record(joints: int, stages: int, sensed: int = 0) -> np.dtype[Any]:
    """Record of the control process at every tick. Times in s on the monotonic clock that all
    processes of one machine share; `fault` is UTF-8, empty while there is none; `sensed` is what
    the driver knows beyond the joints (the place of an object).

    `action` [size] is what the policy's chunk seen at `followed` says for the follower's step
    number `step` (a person's where `intervened`), `proposed` [joints] the target that it means,
    `filtered` what the safety chain left of that, `sent` what the limits did. `reference` [joints]
    is where that step leads, which the next action moves (`sent` of an arm that follows nothing).
    """
    return np.dtype(
        [
            ("tick", "<i8"),
            ("now", "<f8"),
            ("measured", "<f8"),  # when q, dq, tau were true
            ("q", "<f8", (joints,)),
            ("dq", "<f8", (joints,)),
            ("tau", "<f8", (joints,)),
            ("width", "<f8"),
            ("sensed", "<f8", (sensed,)),
            ("step", "<i8"),
            ("size", "<i4"),
            ("action", "<f4", (MOST_ACTION,)),
            ("intervened", "<i4"),
            ("followed", "<f8"),
            ("paused", "<f8"),  # s in which the follower waited for a slow tool, since it began
            ("proposed", "<f8", (joints,)),
            ("reference", "<f8", (joints,)),
            ("filtered", "<f8", (joints,)),
            ("sent", "<f8", (joints,)),
            ("sent_width", "<f8"),
            ("mode", "<i4"),
            ("ended", "<i4"),  # an Ended
            ("starved", "<i4"),
            ("answered", "<i8"),  # number of the newest request that was acted on
            ("refused", "<i8"),  # number of the newest request that was not
            ("reason", f"S{TEXT}"),  # why that one was refused, where the mode does not say it
            ("changed", "<f8", (stages,)),
            ("counts", "<i8", (stages,)),
            ("missed", "<i8"),
            ("late", "<f8"),
            ("worst", "<f8"),
            ("fault", f"S{TEXT}"),
        ]
    )


REQUEST = np.dtype([("number", "<i8"), ("command", "<i4"), ("seconds", "<f8"), ("stop", "<u8")])
"""Record of the daemon: a request. `seconds`: the time limit of the episode that START begins
(0: none). `stop`: number of the newest press of the emergency stop that who asks for RESET saw."""

HEARTBEAT = np.dtype([("count", "<i8"), ("time", "<f8")])
"""Record of the daemon's main loop at every poll. The control process watches `count` with its own
clock; `time` (s, the daemon's monotonic clock) is for people."""
