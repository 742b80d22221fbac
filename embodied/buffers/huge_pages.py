"""Large arrays in huge pages (2 MiB), where the system has them: random reads miss the TLB less."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 32 << 20  # bytes; below, the pages' entries are cached anyway


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As `torch.empty`; a large one on the CPU is in huge pages if Linux gives them."""
    device = torch.device(device)
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    # Private: Linux makes huge pages of shared memory only where they are enabled separately.
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=dtype).view(*shape)  # the tensor keeps `area`
