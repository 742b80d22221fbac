"""The shared memory between the control process, the policy process, the daemon and terminals."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from embodied.real_robot.ipc.messages import CHUNK, PERSON, TAKEOVER
from embodied.real_robot.kernel.channels import EmergencyStop, KernelChannels
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import DEADMAN, HEARTBEAT, REQUEST, VERSION, state_record


class Role(StrEnum):
    """Who opens the channels. Each maps for writing what it writes, and the rest for reading."""

    CONTROL = "control"
    POLICY = "policy"
    DAEMON = "daemon"
    READER = "reader"
    ALL = "all"
    """One process that plays all of them: a test, a benchmark."""


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
