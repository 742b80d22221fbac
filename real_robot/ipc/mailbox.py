"""Seqlock mailbox: the newest message from one process to others, in shared memory, without locks.

One writer, any number of readers (a sequence lock): the writer makes the counter odd, writes, and
makes it even; a reader that found it odd, or changed, reads again. A writer that dies in between
leaves it odd, and readers keep their last message. Messages are fixed records of numbers; nothing
is unpickled.

There is no memory barrier between the counter and the record, because Python has none. x86-64 keeps
the order of stores and the order of loads of each core (total store order), so a reader there never
takes a half-written record for a whole one. aarch64 may reorder both: a torn record could be read
as a whole one. Only x86-64 is supported; `embodied deploy` warns on other machines.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x656D626F
HEAD = np.dtype([("magic", "<u4"), ("version", "<u4"), ("size", "<u8"), ("counter", "<u8")])
TRIES = 1000


ORDERED = ("x86_64", "amd64")
"""Machines that keep the order of stores and of loads (`platform.machine()`, in lower case)."""


class MailboxError(RuntimeError):
    """A mailbox does not exist, or is of another version."""


def keeps_order(machine: str | None = None) -> bool:
    """Whether mailboxes are safe on this machine: whether it keeps the order of memory accesses."""
    return (platform.machine() if machine is None else machine).lower() in ORDERED


class Mailbox:
    """One record of `dtype` in the file `path`, which should be on a memory file system.

    The writer fills `fields` and calls `send`; a reader's `receive` fills its own `fields`.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], version: int, create: bool) -> None:
        self.path, self.size = path, HEAD.itemsize + dtype.itemsize
        if create:
            # Other users may neither read nor write it.
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(handle, self.size)
        else:
            handle = self._open()
        try:
            self._map = mmap.mmap(handle, self.size)
        finally:
            os.close(handle)
        self._head: NDArray[Any] = np.frombuffer(self._map, HEAD, 1)
        self._body: NDArray[Any] = np.frombuffer(self._map, dtype, 1, HEAD.itemsize)
        self.fields: NDArray[Any] = np.zeros(1, dtype)
        self._counter: NDArray[np.uint64] = self._head["counter"]
        if create:
            self._head[:] = (MAGIC, version, dtype.itemsize, 0)
        elif self._head[["magic", "version", "size"]][0].item() != (MAGIC, version, dtype.itemsize):
            raise MailboxError(f"{path} is of another version; restart both sides")
        self.seen = 0

    def _open(self) -> int:
        try:
            handle = os.open(self.path, os.O_RDWR)
        except FileNotFoundError as error:
            raise MailboxError(
                f"{self.path} is not there; is the robot's daemon running?"
            ) from error
        if os.fstat(handle).st_size != self.size:
            os.close(handle)
            raise MailboxError(f"{self.path} is of another version; restart both sides")
        return handle

    def send(self) -> None:
        """Publish `fields`."""
        # Odd, also where a writer before this one died within a message and left it so.
        self._counter[0] |= np.uint64(1)
        self._body[:] = self.fields
        self._counter[0] += 1

    def receive(self) -> bool:
        """Copy the newest message to `fields`; False where there is none newer than the last.

        Waits a moment for a message that is being written. A writer that died while writing counts
        as one that sends nothing.
        """
        for _ in range(TRIES):
            before = int(self._counter[0])
            if before == self.seen:
                return False
            if before % 2 == 0:
                self.fields[:] = self._body
                if int(self._counter[0]) == before:
                    self.seen = before
                    return True
            time.sleep(0)
        return False

    def close(self) -> None:
        """Unmap the memory; the file stays until its owner unlinks it."""
        del self._head, self._body, self._counter
        self._map.close()


def memory_folder() -> Path:
    """The folder for shared memory: /dev/shm, or /tmp where that cannot be written."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path("/tmp")
