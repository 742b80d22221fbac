"""What control process, policy process and daemon tell each other: fixed records of numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

VERSION = 1
MOST_STEPS, MOST_ACTION, TEXT = 64, 32, 240


class Mode(IntEnum):
    """Of the control process. From ESTOP only an operator's reset leads on."""

    DISCONNECTED = 0
    IDLE = 1
    ARMED = 2
    RUNNING = 3
    STOPPING = 4
    ESTOP = 5


class Wish(IntEnum):
    """What an operator asks for."""

    NOTHING = 0
    ARM = 1
    START = 2
    STOP = 3
    ESTOP = 4
    RESET = 5
    QUIT = 6


def state_record(joints: int, stages: int) -> np.dtype[Any]:
    """From the control process, every tick. Times in s on the monotonic clock that all processes of
    one machine share; `fault` is UTF-8, empty while there is none."""
    return np.dtype(
        [
            ("tick", "<i8"),
            ("now", "<f8"),
            ("measured", "<f8"),  # when q, dq, tau were true
            ("q", "<f8", (joints,)),
            ("dq", "<f8", (joints,)),
            ("tau", "<f8", (joints,)),
            ("width", "<f8"),
            ("sent", "<f8", (joints,)),
            ("sent_width", "<f8"),
            ("mode", "<i4"),
            ("starved", "<i4"),
            ("answered", "<i8"),  # number of the newest request that was acted on
            ("refused", "<i8"),  # number of the newest request that was not
            ("changed", "<f8", (stages,)),
            ("counts", "<i8", (stages,)),
            ("missed", "<i8"),
            ("late", "<f8"),
            ("worst", "<f8"),
            ("fault", f"S{TEXT}"),
        ]
    )


CHUNK = np.dtype(
    [
        ("number", "<i8"),
        ("seen", "<f8"),  # `measured` of the state that it was made from
        ("start", "<f8"),  # the time of its first action
        ("steps", "<i4"),
        ("size", "<i4"),
        ("actions", "<f4", (MOST_STEPS, MOST_ACTION)),
    ]
)
"""From the policy process, at every decision."""

REQUEST = np.dtype([("number", "<i8"), ("wish", "<i4")])
"""From the daemon."""
