"""The shared memory that the kernel reads and writes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.real_robot.kernel.mailbox import Mailbox, mapped

NUMBER = np.dtype("<u8")


class EmergencyStop:
    """The flag in the file `path`. `create`: make it, with access for this user only. Only what
    was opened to `write` can be pressed.

    It reaches the control process without the daemon. The file holds one number of 8 bytes: 0, or
    that of the newest press. The control process looks at it in every tick, and latches where it
    has changed. Nobody puts it back, so that no press is lost: a reset says which one its operator
    has seen. One aligned store of 8 bytes is never seen half written."""

    def __init__(self, path: Path, create: bool = False, write: bool = False) -> None:
        self._map = mapped(path, NUMBER.itemsize, create, write)
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
class KernelChannels:
    """The kernel writes `state` and reads the others: the daemon writes `request` and `heartbeat`,
    an operator's terminal `deadman` (hold-to-run), and any process of the same user `estop`, but
    for the policy's."""

    state: Mailbox
    request: Mailbox
    heartbeat: Mailbox
    deadman: Mailbox
    estop: EmergencyStop
