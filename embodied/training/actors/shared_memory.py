"""SharedWeights: the learner's weights in memory that the processes of its actors share.

Two slots are written in turn and a reader never waits: it checks its copy's checksum, which depends
on the version, and copies again where the writer was faster.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor, nn

from embodied.training.actors.transport import ActorWeights, Weights

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
