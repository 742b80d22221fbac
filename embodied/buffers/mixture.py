"""Mix and Relabel: sources made of sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from embodied.buffers.source import Source
from embodied.core.tensors import Tensors


class Mixture:
    """Rows of several sources, interleaved: every minibatch slice of a batch keeps the ratio.

    With fractions (1/2, 1/2) rows alternate; in general the pattern repeats every `period` rows, so
    that any slice that is a multiple of `period` rows long is mixed exactly.
    """

    def __init__(self, sources: Sequence[Source], fractions: Sequence[float]) -> None:
        exact = [Fraction(f).limit_denominator(64) for f in fractions]
        if len(sources) != len(exact) or sum(exact) != 1 or min(exact) < 0:
            raise ValueError(f"fractions {list(fractions)} should be one a source and sum to 1")
        self.period = math.lcm(*(f.denominator for f in exact))
        self.counts = [int(f * self.period) for f in exact]
        self.sources = list(sources)

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def sample(self, n: int) -> Tensors:
        """`n` rows; ValueError if `n` is not a multiple of the period or keys differ."""
        if n % self.period:
            raise ValueError(f"a batch of {n} rows cannot be mixed exactly in {self.counts}")
        times = n // self.period
        parts = [
            source.sample(count * times)
            for source, count in zip(self.sources, self.counts, strict=True)
            if count
        ]
        keys = set(parts[0])
        for part in parts[1:]:
            if set(part) != keys:
                raise ValueError(f"mixed sources differ in {sorted(keys ^ set(part))}")
        return {
            key: torch.cat(
                [part[key].reshape(times, -1, *part[key].shape[1:]) for part in parts], 1
            ).flatten(0, 1)
            for key in parts[0]
        }
