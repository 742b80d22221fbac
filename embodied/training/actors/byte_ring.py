"""ByteRing: a queue of messages (bytes) in shared memory, with one writer and one reader.

The counters are written after the data that they count. That order holds on x86-64; on other
processors the semaphores of `ActorPool`, released after each message, provide it.
"""

from __future__ import annotations

import torch

HEAD, TAIL, PUT, TAKEN = range(4)  # bytes and messages, written and read since the start
LENGTH = 8  # bytes of a message's length


class ByteRing:
    """Holds `capacity` bytes. Pass it to a process as an argument: both sides share the memory.

    A writer that is killed leaves at most an unfinished message, which no counter counts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.counters = torch.zeros(4, dtype=torch.int64).share_memory_()
        self.data = torch.zeros(capacity, dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        """Messages that wait."""
        return self.put_count - self.taken_count

    @property
    def put_count(self) -> int:
        """Messages that were put since the start."""
        return int(self.counters[PUT])

    @property
    def taken_count(self) -> int:
        """Messages that were taken since the start."""
        return int(self.counters[TAKEN])

    def put(self, message: bytes) -> bool:
        """Append a message; False if it does not fit at present. ValueError if it never will."""
        size = LENGTH + len(message)
        if size > self.capacity:
            raise ValueError(f"a message of {size:,} bytes; the ring holds {self.capacity:,}")
        head = int(self.counters[HEAD])
        if head + size - int(self.counters[TAIL]) > self.capacity:
            return False
        self._write(head, len(message).to_bytes(LENGTH, "little"))
        self._write(head + LENGTH, message)
        self.counters[HEAD] = head + size
        self.counters[PUT] += 1
        return True

    def take(self) -> bytes | None:
        """The oldest message, or None."""
        if not len(self):
            return None
        tail = int(self.counters[TAIL])
        length = int.from_bytes(self._read(tail, LENGTH), "little")
        message = self._read(tail + LENGTH, length)
        self.counters[TAIL] = tail + LENGTH + length
        self.counters[TAKEN] += 1
        return message

    def _write(self, at: int, content: bytes) -> None:
        view, at = self.data.numpy().data, at % self.capacity
        end = min(len(content), self.capacity - at)
        view[at : at + end] = content[:end]
        view[: len(content) - end] = content[end:]

    def _read(self, at: int, length: int) -> bytes:
        view, at = self.data.numpy().data, at % self.capacity
        end = min(length, self.capacity - at)
        return bytes(view[at : at + end]) + bytes(view[: length - end])
