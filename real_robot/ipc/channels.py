"""The three mailboxes between the control process, the policy process and the daemon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from real_robot.ipc.mailbox import Mailbox
from real_robot.ipc.messages import CHUNK, REQUEST, VERSION, state_record


@dataclass(frozen=True)
class Channels:
    """The three mailboxes: the control process writes `state` and reads the others."""

    state: Mailbox
    chunk: Mailbox
    request: Mailbox

    @classmethod
    def make(cls, folder: Path, joints: int, stages: int, sensed: int = 0) -> Channels:
        """New ones in `folder`; this process owns them."""
        return cls._all(folder, state_record(joints, stages, sensed), create=True)

    @classmethod
    def open(cls, folder: Path, joints: int, stages: int, sensed: int = 0) -> Channels:
        """Those that are there. MailboxError where there are none."""
        return cls._all(folder, state_record(joints, stages, sensed), create=False)

    @classmethod
    def _all(cls, folder: Path, record: np.dtype[Any], create: bool) -> Channels:
        state = Mailbox(folder / "state", record, VERSION, create)
        chunk = Mailbox(folder / "chunk", CHUNK, VERSION, create)
        return cls(state, chunk, Mailbox(folder / "request", REQUEST, VERSION, create))
