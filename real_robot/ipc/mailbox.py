"""Mailbox: the newest message from one process to others, through shared memory, without locks.

One writer, any number of readers (a sequence lock): the writer makes the counter odd, writes, and
makes it even; a reader that saw it odd or saw it change reads again. A writer that dies in between
leaves it odd, and readers keep what they had. Messages are fixed records of numbers, nothing is
ever unpickled.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x656D626F
HEAD = np.dtype([("magic", "<u4"), ("version", "<u4"), ("size", "<u8"), ("counter", "<u8")])
TRIES = 1000


class MailboxError(RuntimeError):
    """A mailbox that is not there, or that is of another version."""


class Mailbox:
    """A record of `dtype` in the file `path` (on a memory file system it is never written out).

    `fields` is the writer's own copy to fill before `send`; a reader's `receive` fills it.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], version: int, create: bool) -> None:
        self.path, self.size = path, HEAD.itemsize + dtype.itemsize
        if create:
            # Nobody else may read or write what an arm does.
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
        """Let readers see `fields`."""
        # Odd, also where a writer before this one died within a message and left it so.
        self._counter[0] |= np.uint64(1)
        self._body[:] = self.fields
        self._counter[0] += 1

    def receive(self) -> bool:
        """Fill `fields` with the newest message; False where there is none newer than the last.

        A message that is being written is waited for, a moment; a writer that died within one is
        as good as silent.
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
        """Let go of the memory; the file stays until its owner unlinks it."""
        del self._head, self._body, self._counter
        self._map.close()


def memory_folder() -> Path:
    """Where shared memory is kept: never on a disk, where there is such a place."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path("/tmp")
