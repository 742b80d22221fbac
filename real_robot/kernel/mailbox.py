"""Seqlock mailbox: the newest message from one process to others, in shared memory, without locks.

One writer, any number of readers (a sequence lock): the writer makes the counter odd, writes, and
makes it even; a reader that found it odd, or changed, reads again. A writer that dies in between
leaves it odd, and readers keep their last message. Messages are fixed records of numbers; nothing
is unpickled.

Python has no memory barriers, and some machines (aarch64) reorder stores and loads: there, an even
counter alone does not show that the record behind it is whole. The writer therefore also stores a
checksum (CRC-32) of the counter and the record, and a reader compares it with its own copy. What is
torn, or of another message than the counter says, does not match and is read again. The checksum of
a state takes 0.5 us, of a chunk of actions 5 us; to send one takes 2 and 7 us in all.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x656D626F
HEAD = np.dtype(
    [("magic", "<u4"), ("version", "<u4"), ("size", "<u8"), ("counter", "<u8"), ("checksum", "<u8")]
)
TRIES = 10
"""Reads of a message that is being written: to write one takes less than 10 us."""


class MailboxError(RuntimeError):
    """A mailbox does not exist, or is of another version."""


def checksum(data: NDArray[np.uint8], number: int) -> int:
    """CRC-32 of a record's bytes that begins with its `number`: the same bytes under another number
    do not match."""
    return zlib.crc32(data.data, number & 0xFFFFFFFF)


def mapped(path: Path, size: int, create: bool, write: bool = False) -> mmap.mmap:
    """Map the `size` bytes of the file `path` for reading, and with `write` for writing as well.
    `create`: make it, with access for this user only, and write. MailboxError where it is not
    there, or of another size."""
    write = write or create
    how = os.O_RDWR if write else os.O_RDONLY
    try:
        handle = os.open(path, how | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    except FileNotFoundError as error:
        if create:
            raise
        raise MailboxError(f"{path} is not there; is the robot's daemon running?") from error
    try:
        if create:
            os.ftruncate(handle, size)
        elif os.fstat(handle).st_size != size:
            raise MailboxError(f"{path} is of another version; restart both sides")
        return mmap.mmap(handle, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
    finally:
        os.close(handle)


class Mailbox:
    """A record of `dtype` in the file `path`, which should be on a memory file system.

    The writer, who opens it to `write`, fills `fields` and calls `send`; a reader's `receive` fills
    its own `fields`.
    """

    def __init__(
        self, path: Path, dtype: np.dtype[Any], version: int, create: bool, write: bool = False
    ) -> None:
        self.path = path
        self.size = HEAD.itemsize + dtype.itemsize
        self._map = mapped(path, self.size, create, write)
        self._attach(dtype)
        if create:
            self._head[:] = (MAGIC, version, dtype.itemsize, 0, 0)
        elif self._head[["magic", "version", "size"]][0].item() != (MAGIC, version, dtype.itemsize):
            raise MailboxError(f"{path} is of another version; restart both sides")

    def _attach(self, dtype: np.dtype[Any]) -> None:
        """Views of the mapped file, and memory for a message."""
        self._head: NDArray[Any] = np.frombuffer(self._map, HEAD, 1)
        # Bytes: to copy records field by field takes ten times as long.
        self._body: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, offset=HEAD.itemsize)
        self.fields: NDArray[Any] = np.zeros(1, dtype)
        self._bytes: NDArray[np.uint8] = self.fields.view(np.uint8)
        self._incoming = np.zeros_like(self._bytes)
        self._counter: NDArray[np.uint64] = self._head["counter"]
        self._checksum: NDArray[np.uint64] = self._head["checksum"]
        self.seen = 0
        self._stuck = 0  # the counter of a message that never became whole

    def send(self) -> None:
        """Publish `fields`."""
        # Odd, also where a writer before this one died within a message and left it so.
        self._counter[0] |= np.uint64(1)
        number = int(self._counter[0]) + 1
        self._body[:] = self._bytes
        self._checksum[0] = checksum(self._bytes, number)
        self._counter[0] = number

    def receive(self) -> bool:
        """Copy the newest message to `fields`; False where there is none newer than the last.

        Waits a moment for a message that is being written, once. A writer that died while writing
        counts as one that sends nothing.
        """
        for _ in range(TRIES):
            before = int(self._counter[0])
            if before == self.seen:
                return False
            if before % 2 == 0 and self._copy(before):
                return True
            if before == self._stuck:
                return False
            time.sleep(0)
        self._stuck = int(self._counter[0])
        return False

    def _copy(self, number: int) -> bool:
        """Message `number` to `fields`, if it is whole; else they stay as they are."""
        np.copyto(self._incoming, self._body)
        known = int(self._checksum[0])
        if int(self._counter[0]) != number or known != checksum(self._incoming, number):
            return False
        np.copyto(self._bytes, self._incoming)
        self.seen = number
        return True

    def close(self) -> None:
        """Unmap the memory; the file stays until its owner unlinks it."""
        del self._head, self._body, self._counter, self._checksum
        self._map.close()


def memory_folder() -> Path:
    """The folder for shared memory: /dev/shm, or /tmp where that cannot be written."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path("/tmp")
