"""The shared memory between the control process, the policy process and the daemon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied.real_robot.ipc.estop import EmergencyStop
from embodied.real_robot.ipc.mailbox import Mailbox
from embodied.real_robot.ipc.messages import (
    CHUNK,
    DEADMAN,
    HEARTBEAT,
    PERSON,
    REQUEST,
    TAKEOVER,
    VERSION,
    state_record,
)


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
        return cls._all(folder, state_record(joints, stages, sensed), create=True)

    @classmethod
    def open(cls, folder: Path, joints: int, stages: int, sensed: int = 0) -> Channels:
        """Open the mailboxes in the folder. MailboxError where there are none."""
        return cls._all(folder, state_record(joints, stages, sensed), create=False)

    @classmethod
    def _all(cls, folder: Path, record: np.dtype[Any], create: bool) -> Channels:
        return cls(
            Mailbox(folder / "state", record, VERSION, create),
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
