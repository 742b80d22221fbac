"""The shared memory between the control process, the policy process and the daemon."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.real_robot.kernel.mailbox import Mailbox, mapped
from embodied.real_robot.kernel.messages import (
    CHUNK,
    DEADMAN,
    HEARTBEAT,
    PERSON,
    REQUEST,
    TAKEOVER,
    VERSION,
    state_record,
)

NUMBER = np.dtype("<u8")


class EmergencyStop:
    """The flag in the file `path`. `create`: make it, with access for this user only.

    It reaches the control process without the daemon. The file holds one number of 8 bytes: 0, or
    that of the newest press. The control process looks at it in every tick, and latches where it
    has changed. Nobody puts it back, so that no press is lost: a reset says which one its operator
    has seen. One aligned store of 8 bytes is never seen half written."""

    def __init__(self, path: Path, create: bool = False) -> None:
        self._map = mapped(path, NUMBER.itemsize, create)
        self._number: NDArray[np.uint64] = np.frombuffer(self._map, NUMBER, 1)

    def press(self) -> None:
        """Stop the arm. Returns at once; the control process acts at its next tick."""
        now = time.monotonic_ns() // 1000  # JSON keeps it
        self._number[0] = max(now, self.number + 1)  # another number at every press

    @property
    def number(self) -> int:
        """0, or which press was the newest."""
        return int(self._number[0])

    def close(self) -> None:
        """Unmap the memory; the file stays until its owner unlinks it."""
        del self._number
        self._map.close()


@dataclass(frozen=True)
class Channels:
    """The control process writes `state` and reads the others: the policy process writes `chunk`,
    the daemon `request` and `heartbeat`, an operator's terminal `deadman` (hold-to-run) and
    `takeover`, and any process of the same user `estop`."""

    state: Mailbox
    chunk: Mailbox
    request: Mailbox
    heartbeat: Mailbox
    deadman: Mailbox
    takeover: Mailbox
    estop: EmergencyStop

    @classmethod
    def make(cls, folder: Path, joints: int, stages: int, sensed: int = 0) -> Channels:
        """New ones in `folder`; this process owns them."""
        return cls.open(folder, joints, stages, sensed, create=True)

    @classmethod
    def open(
        cls, folder: Path, joints: int, stages: int, sensed: int = 0, create: bool = False
    ) -> Channels:
        """Open the mailboxes in the folder. MailboxError where there are none."""
        return cls(
            Mailbox(folder / "state", state_record(joints, stages, sensed), VERSION, create),
            Mailbox(folder / "chunk", CHUNK, VERSION, create),
            Mailbox(folder / "request", REQUEST, VERSION, create),
            Mailbox(folder / "heartbeat", HEARTBEAT, VERSION, create),
            Mailbox(folder / DEADMAN, HEARTBEAT, VERSION, create),
            Mailbox(folder / TAKEOVER, PERSON, VERSION, create),
            EmergencyStop(folder / "estop", create),
        )

    def beat(self, now: float) -> None:
        """The daemon is alive at `now` (s)."""
        fields = self.heartbeat.fields
        fields["count"] += 1
        fields["time"] = now
        self.heartbeat.send()
