"""SharedWeights: what a policy learns, in shared memory, with a version. One writer, many readers.

Two slots are written in turn and a reader never waits: it checks its copy's checksum, which depends
on the version, and copies again where the writer was faster.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor, nn

VERSION, SUMS = 0, 1  # the newest version, then one checksum for each slot


def learned(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: parameters that need gradients, and all buffers."""
    named = {name: p.data for name, p in module.named_parameters() if p.requires_grad}
    return named | dict(module.named_buffers())


class SharedWeights:
    """The learned tensors of `policy`; pass it to a process as an argument."""

    def __init__(self, policy: nn.Module) -> None:
        self.sizes = [each.nbytes for each in learned(policy).values()]
        self.counters = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.slots = torch.zeros(2, sum(self.sizes), dtype=torch.uint8).share_memory_()

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return int(self.counters[VERSION])

    def publish(self, policy: nn.Module) -> int:
        """Write the weights of `policy` as the next version; returns it."""
        version = self.version + 1
        slot = self.slots[version % 2]
        parts = slot.split(self.sizes)
        for part, tensor in zip(parts, learned(policy).values(), strict=True):
            part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        self.counters[SUMS + version % 2] = crc32(slot.numpy().data, version)
        self.counters[VERSION] = version
        return version

    def load_into(self, policy: nn.Module, held: int) -> int:
        """Copy the newest version into `policy`, which has version `held`; returns what it has
        then."""
        while (version := self.version) != held:
            copy = self.slots[version % 2].clone()
            if crc32(copy.numpy().data, version) != int(self.counters[SUMS + version % 2]):
                continue
            parts = copy.split(self.sizes)
            for part, tensor in zip(parts, learned(policy).values(), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
            return version
        return held
