"""What actor processes share with the learner's: messages (ByteRing) and weights (SharedWeights).

The counters of messages are written after the data that they count. That order holds on x86-64; on
other processors the semaphores of `ActorPool`, released after each message, provide it. Of weights
two slots are written in turn and a reader never waits: it checks its copy's checksum, which depends
on the version, and copies again where the writer was faster.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor, nn

from embodied.training.actors.transport import ActorWeights, Weights

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


VERSION, SUMS = 0, 1  # the newest version, then one checksum for each slot


def learned(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: parameters that need gradients, and all buffers."""
    named = {name: p.data for name, p in module.named_parameters() if p.requires_grad}
    return named | dict(module.named_buffers())


def flat_weights(module: nn.Module) -> Tensor:
    """The learned tensors as bytes [n] (uint8), one after the other."""
    return torch.cat([_bytes(each) for each in learned(module).values()])


def load_flat(module: nn.Module, flat: Tensor) -> None:
    """Copy `flat_weights` of an equal module into `module`."""
    tensors = learned(module).values()
    parts = flat.split([each.nbytes for each in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class SharedWeights(Weights, ActorWeights):
    """The learned tensors of `policy`; pass it to a process as an argument."""

    def __init__(self, policy: nn.Module) -> None:
        self.version = 0  # of the writer
        self.sizes = [each.nbytes for each in learned(policy).values()]
        self.counters = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.slots = torch.zeros(2, sum(self.sizes), dtype=torch.uint8).share_memory_()

    def publish(self, policy: nn.Module) -> int:
        version = self.version = self.version + 1
        slot = self.slots[version % 2]
        parts = slot.split(self.sizes)
        for part, tensor in zip(parts, learned(policy).values(), strict=True):
            part.copy_(_bytes(tensor))
        self.counters[SUMS + version % 2] = crc32(slot.numpy().data, version)
        self.counters[VERSION] = version
        return version

    def for_actor(self) -> SharedWeights:
        return self

    def load_into(self, policy: nn.Module, held: int) -> int:
        while (version := int(self.counters[VERSION])) != held:
            copy = self.slots[version % 2].clone()
            if crc32(copy.numpy().data, version) != int(self.counters[SUMS + version % 2]):
                continue
            load_flat(policy, copy)
            return version
        return held
