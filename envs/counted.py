"""One random stream for each row, all of them drawn at once, on any device.

Sources: counter-based generators (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011) and the mixing function of SplitMix64 (Steele, Lea & Flood, 2014):
number(row, i) = mix(key(row) + i * golden), where key comes from the seed and the row's number.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 64-bit words as torch has them: signed, and they wrap around.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)


class Streams:
    """`key` and `count` [B] int64 are all there is to save: a row's numbers depend on them only."""

    def __init__(self, rows: int, device: torch.device, seed: int) -> None:
        self.key = torch.zeros(rows, dtype=torch.int64, device=device)
        self.count = torch.zeros_like(self.key)
        self.seed(seed, torch.ones(rows, dtype=torch.bool, device=device))

    def seed(self, seed: int, mask: Tensor) -> None:
        """Begin the streams of rows `mask` [B] again, row i from (seed, i)."""
        rows = torch.arange(len(mask), device=mask.device)
        key = _mixed(_mixed(torch.full_like(rows, seed) + GOLDEN) + (rows + 1) * GOLDEN)
        self.key = torch.where(mask, key, self.key)
        self.count = self.count.masked_fill(mask, 0)

    def uniform(self, size: int, mask: Tensor) -> Tensor:
        """Numbers [B, size], float64 in [0, 1); only rows `mask` [B] move on by them."""
        index = self.count[:, None] + torch.arange(1, size + 1, device=self.count.device)
        words = _mixed(self.key[:, None] + index * GOLDEN)
        self.count = self.count + size * mask
        return _shifted(words, 11).double() / (1 << 53)


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ _shifted(word, 30)) * FIRST
    word = (word ^ _shifted(word, 27)) * SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in (torch would bring in the sign)."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
