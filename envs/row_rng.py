"""RowRng: one independent random generator per parallel env, evaluated as a batch.

Counter-based (SplitMix64; Steele, Lea and Flood, 2014): word n of an env is a hash of its key and
n,

    z = key + n g;  z = (z ^ z >> 30) a;  z = (z ^ z >> 27) b;  z ^ z >> 31     (64 bits, wrapping)

so the state of an env is two integers, envs do not influence each other, and CPU and GPU draw the
same words. One word gives two uniform numbers, or two normal ones (Box and Muller, 1958).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


GOLDEN = _signed(0x9E3779B97F4A7C15)
A = _signed(0xBF58476D1CE4E5B9)
B = _signed(0x94D049BB133111EB)
UNIT = 2.0**-32
WORD = (1 << 64) - 1


class RowRng:
    """`state` [rows, 2] (int64): the key of each env and the number of words it has drawn."""

    def __init__(self, seed: int, rows: int, device: torch.device | str = "cpu") -> None:
        self.state = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self._lanes: dict[int, Tensor] = {}
        self.seed(seed, torch.arange(rows, device=device))

    def seed(self, seed: int, rows: Tensor) -> None:
        """Seed the generators of `rows` [n] (int64): env i from (seed, i) only."""
        key = torch.full_like(rows, _signed(seed & WORD))
        key = mixed(mixed(key) + (rows + 1) * GOLDEN)
        self.state[rows] = torch.stack([key, torch.zeros_like(key)], 1)

    def words(self, count: int, rows: Tensor | None = None) -> Tensor:
        """The next `count` words of every env, or of `rows` [n]: int64 [count, n]."""
        state = self.state if rows is None else self.state[rows]
        base = torch.addcmul(state[:, 0], state[:, 1], self._golden)
        if rows is None:
            self.state[:, 1] += count
        else:
            self.state[rows, 1] = state[:, 1] + count
        # [count, 1]: g, 2 g, ... so that a row's words continue where it stopped.
        if count not in self._lanes:
            lanes = torch.arange(1, count + 1, device=self.state.device) * GOLDEN
            self._lanes[count] = lanes[:, None]
        return mixed(base + self._lanes[count])

    def uniform(self, count: int, rows: Tensor | None = None) -> Tensor:
        """Return `count` numbers per env, uniform in (0, 1]: float32 [count, n]."""
        word = self.words(-(-count // 2), rows)
        return _open(torch.cat([word >> 32, word.int()]).float())[:count]

    def normal(self, count: int, rows: Tensor | None = None) -> Tensor:
        """Return `count` standard normal numbers per env: float32 [count, n]; none is beyond
        5.9."""
        word = self.words(-(-count // 2), rows)
        radius = _open((word >> 32).float()).log_().mul_(-2).sqrt_()
        angle = word.int().float().mul_(2 * math.pi * UNIT)
        drawn = torch.empty(2, *word.shape, device=word.device)
        torch.mul(radius, angle.cos(), out=drawn[0])
        torch.mul(radius, angle.sin_(), out=drawn[1])
        return drawn.flatten(0, 1)[:count]

    @property
    def _golden(self) -> Tensor:
        if 0 not in self._lanes:
            self._lanes[0] = torch.tensor(GOLDEN, device=self.state.device)
        return self._lanes[0]


def mixed(word: Tensor) -> Tensor:
    """SplitMix64's finaliser of int64 words, in place (shifts are made logical by masks)."""
    shifted = torch.empty_like(word)
    for bits, factor in ((30, A), (27, B), (31, None)):
        torch.bitwise_right_shift(word, bits, out=shifted)
        word.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))
        if factor is not None:
            word.mul_(factor)
    return word


def _open(half: Tensor) -> Tensor:
    """Signed 32-bit numbers, as floats, to (0, 1], in place; the least is 2^-25, so that its
    logarithm is finite."""
    return half.mul_(UNIT).add_(0.5 + 2.0**-25)


def row_seed(seed: int | None, row: int) -> int:
    """A simulator's seed for one env: 31 bits that depend on (seed, row) only; random if `seed` is
    None."""
    entropy = None if seed is None else (seed, row)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


def pack(generator: np.random.Generator) -> NDArray[np.int64]:
    """A PCG64 generator as six int64 words: two 128-bit numbers, and the half word it keeps."""
    state: Any = generator.bit_generator.state
    wide = (state["state"]["state"], state["state"]["inc"])
    words = [part for number in wide for part in (number & WORD, number >> 64)]
    return np.array([*words, state["has_uint32"], state["uinteger"]], np.uint64).view(np.int64)


def unpack(generator: np.random.Generator, words: NDArray[np.int64]) -> None:
    """Continue `generator` from what `pack` returned."""
    low, high, inc_low, inc_high, has, kept = (int(word) for word in words.view(np.uint64))
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": low | high << 64, "inc": inc_low | inc_high << 64},
        "has_uint32": has,
        "uinteger": kept,
    }
