"""The shared memory between the control process, the policy process, the daemon and terminals, and
the messages in it that the kernel does not read: fixed records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from embodied.real_robot.kernel.channels import EmergencyStop, KernelChannels
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import (
    DEADMAN,
    HEARTBEAT,
    MOST_ACTION,
    REQUEST,
    TEXT,
    VERSION,
    state_record,
)

TAKEOVER = "takeover"
"""The mailbox of a person who takes over from the policy: a PERSON of the operator's terminal."""
READY = "policy.ready"
"""The file with the process id of a policy that is ready to take over from another."""
MOST_STEPS = 128  # of a chunk
MOST_NOISE = 4096  # numbers of a chunk's noise: 128 steps of 32 numbers each
MOST_CAMERAS = 8
DAEMON_GONE, TERMINATED = "its daemon is gone", "it was told to end"
"""Why a control process ends, as the last fault that it reports; every session ends with one."""

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


class Role(StrEnum):
    """Who opens the channels. Each maps for writing what it writes, and the rest for reading."""

    CONTROL = "control"
    POLICY = "policy"
    DAEMON = "daemon"
    READER = "reader"
    ALL = "all"  # one process that plays all of them: a test, a benchmark


WRITES = {
    Role.CONTROL: ("state", "estop"),  # it presses the button to test its stop
    Role.POLICY: ("chunk",),
    Role.DAEMON: ("request", "heartbeat", "estop"),
    Role.READER: (),
    Role.ALL: ("state", "chunk", "request", "heartbeat", DEADMAN, TAKEOVER, "estop"),
}
"""Channels that each role may write. An operator's terminal opens `deadman` and `takeover`, and
whoever stops the arm `estop`, one by one."""


@dataclass(frozen=True)
class Channels(KernelChannels):
    """Beside the kernel's: the policy process writes `chunk`, an operator's terminal `takeover`;
    the control process follows them."""

    chunk: Mailbox
    takeover: Mailbox

    @classmethod
    def make(
        cls, folder: Path, joints: int, stages: int, sensed: int = 0, role: Role = Role.ALL
    ) -> Channels:
        """New ones in `folder`; this process owns them, and writes as `role`."""
        cls._open(folder, joints, stages, sensed, Role.ALL, create=True).close()
        return cls.open(folder, joints, stages, sensed, role)

    @classmethod
    def open(
        cls, folder: Path, joints: int, stages: int, sensed: int = 0, role: Role = Role.READER
    ) -> Channels:
        """Open the mailboxes in the folder as `role`. MailboxError where there are none."""
        return cls._open(folder, joints, stages, sensed, role, create=False)

    @classmethod
    def _open(
        cls, folder: Path, joints: int, stages: int, sensed: int, role: Role, create: bool
    ) -> Channels:
        records = {
            "state": state_record(joints, stages, sensed),
            "request": REQUEST,
            "heartbeat": HEARTBEAT,
            DEADMAN: HEARTBEAT,
            "chunk": CHUNK,
            TAKEOVER: PERSON,
        }
        boxes = {
            name: Mailbox(folder / name, record, VERSION, create, name in WRITES[role])
            for name, record in records.items()
        }
        return cls(**boxes, estop=EmergencyStop(folder / "estop", create, "estop" in WRITES[role]))

    def beat(self, now: float) -> None:
        """The daemon is alive at `now` (s)."""
        fields = self.heartbeat.fields
        fields["count"] += 1
        fields["time"] = now
        self.heartbeat.send()

    def close(self) -> None:
        """Unmap the memory; the files stay until their owner unlinks them."""
        for each in vars(self).values():
            each.close()
