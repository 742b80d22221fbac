"""Messages between control process, policy process and daemon: fixed records of numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

VERSION = 8
DEADMAN = "deadman"
"""The mailbox of hold-to-run: a HEARTBEAT of the operator's terminal."""
TAKEOVER = "takeover"
"""The mailbox of a person who takes over from the policy: a PERSON of the operator's terminal."""
READY = "policy.ready"
"""The file with the process id of a policy that is ready to take over from another."""
MOST_STEPS = 128
MOST_ACTION = 32
MOST_NOISE = 4096
TEXT = 240
"""Steps and numbers of a chunk, and of its noise: 128 steps of 32 numbers each."""
MOST_CAMERAS = 8


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
DAEMON_GONE, TERMINATED = "its daemon is gone", "it was told to end"
"""Why a control process ends, as the last fault that it reports; every session ends with one."""


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


CHUNK = np.dtype(
    [
        ("number", "<i8"),
        ("seen", "<f8"),  # `measured` of the state that it was made from
        ("start", "<f8"),  # the time of its first action
        ("steps", "<i4"),
        ("size", "<i4"),
        ("actions", "<f4", (MOST_STEPS, MOST_ACTION)),
        ("noise_size", "<i4"),
        ("noise", "<f4", (MOST_NOISE,)),
        ("image_times", "<f8", (MOST_CAMERAS,)),
    ]
)
"""Record of the policy process at every decision: with the first `noise_size` numbers of `noise`
the same policy decides the same again (0: it has none, or more than fits). `image_times` are the
capture times of its images, in the order of its Spec."""

PERSON = np.dtype(
    [
        ("number", "<i8"),
        ("over", "<i4"),  # whether they have taken over
        ("seen", "<f8"),  # `measured` of the state that they acted on
        ("start", "<f8"),  # the time from which on `action` is meant, for one step
        ("size", "<i4"),
        ("action", "<f4", (MOST_ACTION,)),
    ]
)
"""Record of an operator's terminal, all the time, while a person may take over."""

CAMERA = np.dtype([("began", "<i8"), ("fault", f"S{TEXT}")])
"""Record of a camera's process: since when (s) it shows pictures (0: not yet), and why no more."""

REQUEST = np.dtype([("number", "<i8"), ("command", "<i4"), ("seconds", "<f8"), ("stop", "<u8")])
"""Record of the daemon: a request. `seconds`: the time limit of the episode that START begins
(0: none). `stop`: number of the newest press of the emergency stop that who asks for RESET saw."""

HEARTBEAT = np.dtype([("count", "<i8"), ("time", "<f8")])
"""Record of the daemon's main loop at every poll. The control process watches `count` with its own
clock; `time` (s, the daemon's monotonic clock) is for people."""

RECORDED = np.dtype(
    [
        ("alive", "<i4"),
        ("ended", "<i8"),  # episodes that ended since it began
        ("episodes", "<i8"),  # of them, those that are on the disk
        ("steps", "<i8"),  # of the newest
        ("success", "<i4"),  # of the newest; -1: not measured
        ("problem", f"S{TEXT}"),  # why the newest is not on the disk
        ("discarded", "<i8"),  # the newest that was removed again, by its number among `ended`
    ]
)
"""Record of the recorder, when it begins and after every episode."""

DISCARD = np.dtype([("ended", "<i8")])
"""Record of an operator's terminal: episode number `ended`, the newest, should not be kept."""
