"""Mix and Relabel: sources made of sources.

Mixing demonstrations into every minibatch follows RLPD (Ball et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from embodied.core.reward import Reward
from embodied.core.tensors import Tensors, cat, take
from embodied.data.source import Source


@dataclass
class Mix:
    """Rows of several sources, `fractions` of each (they are scaled to sum to 1).

    The sources take turns row by row, so that cutting n rows into minibatches keeps the split in
    each: exactly where it can be met in whole rows, and within one row otherwise.
    """

    sources: Sequence[Source]
    fractions: Sequence[float]
    _plans: dict[int, tuple[list[int], Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.fractions) or not self.sources:
            raise ValueError(
                f"{len(self.sources)} sources need as many fractions, got {list(self.fractions)}"
            )
        if min(self.fractions) < 0 or sum(self.fractions) <= 0:
            raise ValueError(f"fractions should be positive, got {list(self.fractions)}")

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def sample(self, n: int) -> Tensors:
        """`n` rows; ValueError when the sources' rows have different keys."""
        if n not in self._plans:
            self._plans[n] = _plan(n, turns(self.fractions, n), len(self.sources))
        counts, order = self._plans[n]
        parts = [
            source.sample(count)
            for source, count in zip(self.sources, counts, strict=True)
            if count
        ]
        if len(parts) == 1:
            return parts[0]
        _require_same_keys(parts)
        rows = cat(parts)
        device = next(iter(rows.values())).device
        if order.device != device:
            order = order.to(device)
            self._plans[n] = counts, order
        return take(rows, order)


@dataclass
class Relabel:
    """`source` with its rewards replaced at sample time by a `reward` that still learns.

    A frozen reward gives the same number every time: it is asked once, by `label`, before a row is
    stored, and sampling passes its rows through.
    """

    source: Source
    reward: Reward

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, n: int) -> Tensors:
        rows = self.source.sample(n)
        return rows if self.reward.frozen else relabeled(rows, self.reward)

    def label(self, rows: Tensors) -> Tensors:
        """`rows` as they are to be stored: with a frozen reward's numbers, else unchanged."""
        return relabeled(rows, self.reward) if self.reward.frozen else rows


def relabeled(rows: Tensors, reward: Reward) -> Tensors:
    """`rows` with `reward` [n] (float32) in place of theirs."""
    with torch.no_grad():
        return {**rows, "reward": reward(rows)}


def turns(fractions: Sequence[float], n: int) -> list[int]:
    """Whose turn it is in each of `n` rows: always the source that lags most behind its share.

    Over a whole period (the least common denominator of the shares) every source has exactly its
    share, so the split is exact in any slice that starts and ends on whole periods.
    """
    exact = [Fraction(fraction).limit_denominator(1000) for fraction in fractions]
    scale = math.lcm(*(share.denominator for share in exact))
    weights = [int(share * scale) for share in exact]
    period, credit, order = sum(weights), [0] * len(weights), []
    for _ in range(n):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        who = credit.index(max(credit))
        credit[who] -= period
        order.append(who)
    return order


def _plan(n: int, order: list[int], sources: int) -> tuple[list[int], Tensor]:
    """Rows of each source, and for each place of the batch its row in their concatenation."""
    counts = [order.count(source) for source in range(sources)]
    starts = [sum(counts[:source]) for source in range(sources)]
    places = []
    for who in order:
        places.append(starts[who])
        starts[who] += 1
    return counts, torch.tensor(places, dtype=torch.int64)


def _require_same_keys(parts: Sequence[Tensors]) -> None:
    for number, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            here, there = (
                sorted(parts[0].keys() - part.keys()),
                sorted(part.keys() - parts[0].keys()),
            )
            raise ValueError(
                f"source {number} of the mix does not fit the first: it lacks {here}, adds {there}"
            )
