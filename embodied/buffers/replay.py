"""ReplayBuffer: a uniform replay buffer in memory, as a ring buffer of transitions.

The float32 leaves of a transition are stored side by side, as one line of a [capacity, F] matrix:
sampling is a single `index_select`, and the leaves of a batch are views of its result. Leaves of
other types (int64, bool) have a tensor each; pictures are stored once (`PictureStore`), however
many transitions show them. The cost of sampling does not depend on the number of stored
transitions. Large arrays are in huge pages (2 MiB), where the system has them: random reads miss
the TLB less.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.buffers.pictures import PictureStore, is_shared, joined, name_of, numbered
from embodied.core import tensors as tt
from embodied.core.bounds import Count, Fraction
from embodied.core.build import ConfigError
from embodied.core.device import free_bytes
from embodied.core.env import Step
from embodied.core.tensors import Tensors

Layout = list[tuple[str, torch.Size]]
PART = 1024  # transitions that are restored at once, as their pictures take memory twice
PICTURES = 9 / 8  # of a transition, at first: one, and one of each episode of eight


class ReplayBuffer:
    """The newest `capacity` transitions, on `device`; allocated at the first `add`."""

    columns: ClassVar[tuple[str, ...]] = ()  # extra columns of sampled batches
    needs_steps: ClassVar[bool] = False  # whether it asks the environment about single steps
    extra_bytes: ClassVar[int] = 0  # of a transition, beside its leaves

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        if capacity < 1:
            raise ValueError(f"replay capacity={capacity} should be at least 1")
        self.capacity = capacity
        self.device = torch.device(device)
        self.size = self.cursor = 0
        self._here: dict[str, torch.Size] = {}
        self._packed: Layout = []
        self._widths: list[int] = []
        self._flat = torch.empty(0)
        self._apart: Tensors = {}
        self._stores: dict[str, PictureStore] = {}  # the frames of each observation
        self._pictures: dict[str, list[str]] = {}  # and the leaves that hold slots of them

    def __len__(self) -> int:
        return self.size

    def room(self) -> tuple[int, str]:
        """Bytes that are free for transitions, and where."""
        return free_bytes(self.device), "memory" if self.device.type == "cpu" else "GPU memory"

    def add(self, rows: Tensors) -> None:
        """Store transitions `rows` [n, ...], overwriting the oldest. Raises ValueError if keys or
        shapes differ from those of stored transitions."""
        n = tt.length(rows)
        if not self._here:
            self._allocate(rows)
        self._check(rows)
        if n > self.capacity:
            rows, n = tt.each(rows, lambda leaf: leaf[-self.capacity :]), self.capacity
        head = min(n, self.capacity - self.cursor)
        if head == n:
            self._write(rows, n)
        else:
            self._write(tt.each(rows, lambda leaf: leaf[:head]), head)
            self._write(tt.each(rows, lambda leaf: leaf[head:]), n - head)

    def sample(self, n: int) -> Tensors:
        """`n` transitions, uniformly with replacement, by the device's default generator. float32
        leaves are views of one new [n, F] matrix and not contiguous: flatten them with `reshape`,
        not `view`."""
        return self.take(self.drawn(n))

    def drawn(self, n: int) -> Tensor:
        """`n` storage positions, uniformly; ValueError if there is no transition."""
        if not self.size:
            raise ValueError("the replay buffer is empty: add transitions before sampling")
        return torch.randint(self.size, (n,), device=self.device)

    def take(self, index: Tensor) -> Tensors:
        """Copies of the transitions at storage positions `index` [n] (int64)."""
        rows = self._stored(index)
        for name, keys in self._pictures.items():
            rows |= {key: self._stores[name].take(rows[key]) for key in keys}
        return rows

    def _stored(self, index: Tensor) -> Tensors:
        """As `take`, with the slots [n, k] of pictures in their place."""
        rows: Tensors = {}
        if self._packed:
            parts = self._flat.index_select(0, index).split_with_sizes(self._widths, 1)
            for (key, shape), part in zip(self._packed, parts, strict=True):
                if len(shape) == 1:
                    rows[key] = part
                else:
                    rows[key] = part.unflatten(1, shape) if shape else part.select(1, 0)
        for key, leaf in self._apart.items():
            rows[key] = leaf.index_select(0, index)
        return rows

    def leaf(self, key: str, index: Tensor) -> Tensor:
        """A copy of one leaf of the transitions at storage positions `index` [n] (int64)."""
        if key in self._apart:
            values = self._apart[key].index_select(0, index)
            store = self._stores.get(name_of(key))
            return values if store is None else store.take(values)
        place = [name for name, _ in self._packed].index(key)
        begin = sum(self._widths[:place])
        part = self._flat[:, begin : begin + self._widths[place]].index_select(0, index)
        return part.reshape(len(index), *self._packed[place][1])

    def settle(self, index: Tensor, error: Tensor) -> None:
        """Set priorities from absolute TD errors `error` [n] of transitions `index` [n]. Does
        nothing here: sampling is uniform."""

    def follow(self, step: Step) -> None:
        """The newest transitions, one of each parallel env in their order, are those of `step`.
        Does nothing here, as does `end_episodes`: the episodes of transitions do not matter."""

    def end_episodes(self, ended: Tensor) -> None:
        """The running episodes of parallel envs `ended` [B] (bool) have no further transitions."""

    def get_state(self) -> dict[str, Any]:
        """The stored transitions (copied) in storage order, and the write position. Pictures are
        numbers of their frames, which are numbered in the order of their first use."""
        every = torch.arange(self.size, device=self.device)
        rows = tt.each(self._stored(every), lambda leaf: leaf.contiguous())
        frames: Tensors = {}
        for name, store in self._stores.items():
            keys = self._pictures[name]
            used, numbers = numbered(torch.stack([rows[key] for key in keys]))
            frames[name] = store.frames(used)
            rows |= dict(zip(keys, numbers, strict=True))
        return {"capacity": self.capacity, "cursor": self.cursor, "rows": rows, "frames": frames}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state of `get_state`; ValueError if the capacity differs."""
        self._require_capacity(state)
        self._here, self._packed, self._apart, self.size, self.cursor = {}, [], {}, 0, 0
        self._pictures, self._stores = {}, {}
        rows, frames = state["rows"], state["frames"]
        for start in range(0, tt.length(rows) if rows else 0, PART):
            part = {key: value[start : start + PART] for key, value in rows.items()}
            for key in part:
                if name_of(key) in frames:
                    part[key] = joined(frames[name_of(key)][part[key]])
            self.add(part)
        self.cursor = state["cursor"]

    def _require_capacity(self, state: dict[str, Any]) -> None:
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"the saved replay buffer has capacity {state['capacity']}, this one "
                f"{self.capacity}: resume with the data.replay_size of the saved run"
            )

    def _allocate(self, rows: Tensors) -> None:
        """Allocate memory for transitions with the leaves of `rows`, in this order: first `obs`,
        `action` and `next_obs`, then the others."""
        keys = sorted(rows, key=_place)
        self._here = shapes = {key: rows[key].shape[1:] for key in keys}
        shared = [key for key in keys if is_shared(key, rows[key])]
        packed = [key for key in keys if rows[key].dtype == torch.float32 and key not in shared]
        self._packed = [(key, shapes[key]) for key in packed]
        self._widths = [math.prod(shapes[key]) for key in packed]
        self._flat = self._array("rows", (self.capacity, sum(self._widths)), torch.float32)
        self._apart = {
            key: self._array(key, (self.capacity, *shapes[key]), rows[key].dtype)
            for key in keys
            if key not in packed and key not in shared
        }
        self._pictures = {name_of(key): [] for key in shared}
        for key in shared:
            self._pictures[name_of(key)].append(key)
        for name, keys in self._pictures.items():
            most = self.capacity * len(keys)
            make = partial(self._array, f"frames/{name}")
            store = PictureStore(rows[keys[0]], most, self._first_room(most), make)
            self._stores[name] = store
            for key in keys:
                slots = self._array(f"slots/{key}", (self.capacity, store.stack), torch.int64)
                self._apart[key] = slots

    def _array(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return empty(shape, dtype, self.device)

    def _first_room(self, most: int) -> int:
        """For how many pictures there is room at first, where there may be `most`."""
        return min(most, math.ceil(PICTURES * self.capacity))

    def _write(self, rows: Tensors, n: int) -> None:
        """Write `n` transitions that fit between the cursor and the end."""
        end = self.cursor + n
        for name, keys in self._pictures.items():
            store = self._stores[name]
            for key in keys:
                store.drop(self._apart[key][self.cursor : min(end, self.size)])
            slots = store.put(torch.cat([rows[key] for key in keys])).split(n)
            rows = rows | dict(zip(keys, slots, strict=True))
        if self._packed:
            leaves = [rows[key].reshape(n, -1) for key, _ in self._packed]
            if leaves[0].device != self.device:
                leaves = [leaf.to(self.device, non_blocking=True) for leaf in leaves]
            torch.cat(leaves, 1, out=self._flat[self.cursor : end])
        for key, leaf in self._apart.items():
            leaf[self.cursor : end] = rows[key]
        self.cursor = end % self.capacity
        self.size = max(self.size, min(end, self.capacity))

    def _check(self, rows: Tensors) -> None:
        """ValueError with the leaves in which `rows` differ from stored transitions."""
        if len(rows) == len(self._here) and all(
            key in rows and rows[key].shape[1:] == shape for key, shape in self._here.items()
        ):
            return
        there = {key: value.shape[1:] for key, value in rows.items()}
        lines = [
            f"{key}: stored {_shown(self._here.get(key))}, new {_shown(there.get(key))}"
            for key in sorted({*self._here, *there})
            if self._here.get(key) != there.get(key)
        ]
        raise ValueError(f"transitions do not fit this replay buffer: {'; '.join(lines)}")


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _place(key: str) -> int:
    """Sort key of a leaf inside a transition."""
    for place, start in enumerate(("obs/", "action", "next_obs/")):
        if key.startswith(start):
            return place
    return 3


@dataclass(frozen=True)
class NewestConfig:
    share: Fraction = 0.5  # of a batch from the newest transitions
    newest: Count = 2000  # how many transitions these are


class NewestReplayBuffer(ReplayBuffer):
    """A share of its samples is of the newest transitions, the others of all.

    The two buffers of GR-RL (ByteDance Seed, 2025), sampled equally: everything (the recordings and
    the base policy's episodes before training), and the newest, which are of almost the present
    policy. The paper's newest are the episodes of the last checkpoints.
    """

    def __init__(
        self, config: NewestConfig, capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(capacity, device)
        self.config = config

    def sample(self, n: int) -> Tensors:
        """`n` transitions with replacement, the newest ones at random places among them."""
        own = round(self.config.share * n)
        every = self.drawn(n - own)
        most = min(self.config.newest, self.size)
        age = torch.randint(most, (own,), device=self.device)
        index = torch.cat([every, (self.cursor - 1 - age) % self.capacity])
        return self.take(index[torch.randperm(n, device=self.device)])


LEAST = 32 << 20  # bytes; below, the pages' entries are cached anyway


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As `torch.empty`; a large one on the CPU is in huge pages if Linux gives them."""
    device = torch.device(device)
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    # Private: Linux makes huge pages of shared memory only where they are enabled separately.
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"a buffer of {size / 1e9:,.2f} GB cannot be had ({error.strerror}): a smaller "
            "data.replay_size, or replay=memmap (on disk)"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=dtype).view(*shape)  # the tensor keeps `area`
