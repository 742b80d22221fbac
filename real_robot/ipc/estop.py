"""Emergency stop in shared memory: it reaches the control process without the daemon.

The file holds one number of 8 bytes: 0, or when the stop was pressed. The control process looks at
it in every tick, latches, and puts the number back to 0 at an operator's reset. One aligned store
of 8 bytes is never seen half written.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.real_robot.ipc.mailbox import mapped

NUMBER = np.dtype("<u8")


class EmergencyStop:
    """The flag in the file `path`. `create`: make it, with access for this user only."""

    def __init__(self, path: Path, create: bool = False) -> None:
        self._map = mapped(path, NUMBER.itemsize, create)
        self._number: NDArray[np.uint64] = np.frombuffer(self._map, NUMBER, 1)

    def press(self) -> None:
        """Stop the arm. Returns at once; the control process acts at its next tick."""
        self._number[0] = time.monotonic_ns() | 1  # another number at every press, never 0

    @property
    def number(self) -> int:
        """0, or which press was the newest."""
        return int(self._number[0])

    @property
    def pressed(self) -> bool:
        """Whether it was pressed since `clear`."""
        return bool(self._number[0])

    def clear(self) -> None:
        """An operator has reset. Only the control process calls this."""
        self._number[0] = 0

    def close(self) -> None:
        """Unmap the memory; the file stays until its owner unlinks it."""
        del self._number
        self._map.close()
