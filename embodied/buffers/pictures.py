"""PictureStore: the pictures of one observation in a replay buffer, each stored once.

The next observation of a transition is the observation of a later one, and a stack of frames shares
all but its newest frame with the stack before it. So transitions store the slots of their frames,
and frames that are equal to the last bit have one slot, in whatever order transitions come (several
envs, n-step returns, action chunks, whole episodes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LEAST = 1024  # bytes; a smaller picture is stored with its transition

Array = Callable[[tuple[int, int], torch.dtype], Tensor]


def is_shared(key: str, leaf: Tensor) -> bool:
    """Whether the leaf `key` of transitions is a picture [n, H, W, C] that a store keeps."""
    size = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
    kind = leaf.dtype in (torch.uint8, torch.float32)
    return bool(name_of(key)) and leaf.ndim == 4 and kind and size >= LEAST


def name_of(key: str) -> str:
    """The observation that the leaf `key` of transitions is of ("": of none)."""
    _, found, name = key.rpartition("obs/")
    return name if found else ""


def split(pictures: Tensor) -> Tensor:
    """The frames [n, k, H, W, c] of pictures [n, H, W, k c]: three channels each, or one."""
    channels = pictures.shape[3]
    return pictures.unflatten(3, (-1, 1 if channels % 3 else 3)).permute(0, 3, 1, 2, 4)


def joined(frames: Tensor) -> Tensor:
    """The pictures [n, H, W, k c] of frames [n, k, H, W, c]."""
    return torch.cat(frames.unbind(1), 3)  # four times as fast as a permuted copy


def numbered(slots: Tensor) -> tuple[Tensor, Tensor]:
    """The values in `slots` (int64), each once in the order of their first use, and the place there
    of each element of `slots`."""
    values, which = slots.unique(return_inverse=True)
    places = torch.arange(slots.numel(), device=slots.device)
    first = places.new_full((len(values),), slots.numel())
    order = first.scatter_reduce(0, which.flatten(), places, "amin").argsort()
    return values[order], order.argsort()[which]


class PictureStore:
    """Frames [slots, H, W, c], each with the number of its references.

    Equal frames are found by a hash and then compared, so a picture comes back exactly. There may
    be `most` different `picture`s [n, H, W, k c]; `array` makes memory, for the frames of `room`
    pictures at first and, where these are not enough, for the others.
    """

    def __init__(self, picture: Tensor, most: int, room: int, array: Array) -> None:
        self.stack, *self.shape = split(picture[:0]).shape[1:]
        self.dtype = picture.dtype
        size = math.prod(self.shape) * self.dtype.itemsize
        self._word = torch.uint8 if size % 4 else torch.int32
        self._width = size // self._word.itemsize
        self._array, self._most = array, most * self.stack
        self._blocks = [array((room, self._width), self._word)]
        self._count: list[int] = []  # references of each slot
        self._hash: list[int] = []  # of the frame in each slot
        self._free: list[int] = []
        self._slot: dict[int, int] = {}  # by hash

    def __len__(self) -> int:
        return len(self._count) - len(self._free)

    def put(self, pictures: Tensor) -> Tensor:
        """The slots [n, k] (int64) of `pictures` [n, H, W, k c], each with one reference more."""
        words = split(pictures).flatten(0, 1).flatten(1).view(self._word)
        slots: list[int] = []
        new: list[int] = []
        for at, frame in enumerate(words.cpu().numpy()):
            number = hash(frame.tobytes())
            slot = self._slot.get(number)
            if slot is None:
                slot = self._slot[number] = self._take_slot(number)
                new.append(at)
            self._count[slot] += 1
            slots.append(slot)
        home = self._blocks[0].device
        words, index = words.to(home), torch.tensor(slots, dtype=torch.int64, device=home)
        self._write(slots, new, words)
        differ = (self._read(index) != words).any(1)
        for at in differ.nonzero().flatten().tolist() if differ.any() else ():
            # Another frame has this hash: one slot more, which no later frame will share.
            self._count[slots[at]] -= 1
            index[at] = slots[at] = self._take_slot(0)
            self._count[slots[at]] += 1
            self._write(slots, [at], words)
        return index.view(len(pictures), self.stack)

    def drop(self, slots: Tensor) -> None:
        """Take one reference from each of `slots` [n, k]; those without any are free."""
        for slot in slots.flatten().tolist():
            self._count[slot] -= 1
            if not self._count[slot]:
                self._free.append(slot)
                if self._slot.get(self._hash[slot]) == slot:
                    del self._slot[self._hash[slot]]

    def take(self, slots: Tensor) -> Tensor:
        """Copies of the pictures [n, H, W, k c] at `slots` [n, k]."""
        frames = self.frames(slots.flatten())
        return frames if self.stack == 1 else joined(frames.unflatten(0, slots.shape))

    def frames(self, slots: Tensor) -> Tensor:
        """Copies of the frames [n, H, W, c] at `slots` [n]."""
        return self._read(slots).view(self.dtype).view(-1, *self.shape)

    def restore(self, slots: Sequence[Tensor]) -> None:
        """Count `slots` as all references to frames that the memory holds already."""
        self._count = torch.cat([each.flatten() for each in slots]).bincount().tolist()
        self._hash = [0] * len(self._count)
        self._free = [slot for slot, count in enumerate(self._count) if not count]
        self._slot = {}

    def _take_slot(self, number: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._hash[slot] = number
            return slot
        self._hash.append(number)
        self._count.append(0)
        if len(self._count) > sum(map(len, self._blocks)):
            others = self._most - len(self._blocks[0])
            self._blocks.append(self._array((others, self._width), self._word))
        return len(self._count) - 1

    def _write(self, slots: Sequence[int], which: Sequence[int], words: Tensor) -> None:
        """Write the frames `which` of `words` [n, W], of which each has its slot."""
        first = len(self._blocks[0])
        for block, start in zip(self._blocks, (0, first), strict=False):
            here = [at for at in which if (slots[at] >= first) == (start > 0)]
            if here:
                index = torch.tensor([slots[at] - start for at in here], device=words.device)
                block.index_copy_(0, index, words[here])

    def _read(self, index: Tensor) -> Tensor:
        first = self._blocks[0]
        if len(self._blocks) == 1:
            return first.index_select(0, index)
        beyond = index - len(first)
        words = first.index_select(0, index.clamp(max=len(first) - 1))
        return torch.where(
            beyond[:, None] < 0, words, self._blocks[1].index_select(0, beyond.clamp(min=0))
        )
