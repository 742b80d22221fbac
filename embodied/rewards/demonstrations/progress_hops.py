"""Hops: progress between two moments as a share of what was left, or of what had been won.

Robo-Dopamine (2025): from progress p to progress q, both in [0, 1],

    h = (q - p) / (1 - p)  if q >= p,  else  (q - p) / p;      p <- p + (1 - p) h, or p + p h

so that hops, put together in any order, never leave [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCORE_BINS = 25
GAP_BINS = 4
OVERSAMPLE = 80


def hop(before: Tensor, after: Tensor) -> Tensor:
    """Hops [N] in [-1, 1] from progress `before` [N] to `after` [N]; none is 0."""
    gain = after - before
    room = torch.where(gain >= 0, 1 - before, before)
    return torch.where(gain == 0, gain, gain / torch.where(gain == 0, 1.0, room)).clamp(-1, 1)


def compose(progress: Tensor, hops: Tensor) -> Tensor:
    """Progress [N] in [0, 1] after `hops` [N] from `progress` [N]."""
    room = torch.where(hops >= 0, 1 - progress, progress)
    return (progress + room * hops).clamp(0, 1)


def integrate(hops: Tensor) -> Tensor:
    """Progress [T + 1] along a trajectory that begins at 0, from its hops [T]; errors add up."""
    progress = hops.new_zeros(len(hops) + 1)
    for t, each in enumerate(hops):
        progress[t + 1] = compose(progress[t], each)
    return progress


def agreement(forward: Tensor, backward: Tensor, tolerance: float) -> Tensor:
    """How far two readouts [N] may be believed together, exp(-((f - b) / tolerance)^2), [N]."""
    return torch.exp(-(((forward - backward) / tolerance) ** 2))


def potential(before: Tensor, after: Tensor, discount: Tensor) -> Tensor:
    """F = gamma^k Phi(s') - Phi(s), [N]: whatever a trajectory does in between cancels."""
    return discount * after - before


def gain(before: Tensor, after: Tensor, discount: Tensor) -> Tensor:
    """Phi(s') - Phi(s), [N], at a true end too: not invariant. Standing still pays nothing (with a
    potential it costs), and progress is worth something even if success is never met, which is
    what exploring from nothing needs: a potential pays every policy that never succeeds alike."""
    return after - before


SHAPINGS = {"potential": potential, "gain": gain}


@dataclass(frozen=True)
class Frames:
    """Moments of several episodes, one after the other: `episode` [N] (int64), `place` [N] in
    [0, 1] (where in its episode), `progress` [N] (no progress at all: 0 throughout)."""

    episode: Tensor
    place: Tensor
    progress: Tensor

    def __len__(self) -> int:
        return len(self.episode)


def moments(length: Tensor, succeeds: bool = True) -> Frames:
    """Evenly spaced progress i / (M - 1) of episodes of `length` [E] frames, at least 2 each;
    episodes that come to nothing stay at 0."""
    episode = torch.repeat_interleave(torch.arange(len(length)), length)
    start = (length.cumsum(0) - length)[episode]
    place = (torch.arange(len(episode)) - start) / (length[episode] - 1)
    return Frames(episode, place, place if succeeds else torch.zeros_like(place))


@dataclass(frozen=True)
class Pairs:
    """`before`, `after` [n]: numbers of frames; `label` [n]: the hop between them."""

    before: Tensor
    after: Tensor
    label: Tensor


def pairs(frames: Frames, n: int, zero: float, cross: float, random: torch.Generator) -> Pairs:
    """`n` training pairs: a share `zero` of a moment with itself, the others drawn equally from
    score bins and bins of the gap in time. A share `cross` of the candidates are of two episodes
    (a reference is always another episode's), the others of one."""
    nothing = round(zero * n)
    pool = OVERSAMPLE * n
    before = torch.randint(len(frames), (pool,), generator=random)
    after = torch.randint(len(frames), (pool,), generator=random)
    same = frames.episode[before] == frames.episode[after]
    wanted = torch.rand(pool, generator=random) < cross
    alone = len(torch.unique(frames.episode)) == 1
    fits = (same != wanted) | alone
    before, after = before[fits], after[fits]
    label = hop(frames.progress[before], frames.progress[after])
    gap = (frames.place[after] - frames.place[before]).abs()
    chosen = balanced(cells(label, gap), n - nothing, random)
    still = torch.randint(len(frames), (nothing,), generator=random)
    return Pairs(
        torch.cat([before[chosen], still]),
        torch.cat([after[chosen], still]),
        torch.cat([label[chosen], torch.zeros(nothing)]),
    )


def cells(label: Tensor, gap: Tensor) -> Tensor:
    """The bin [N] (int64) of each candidate: its score in [-1, 1] by its gap in [0, 1]."""
    score = ((label + 1) / 2 * SCORE_BINS).long().clamp(max=SCORE_BINS - 1)
    return score * GAP_BINS + (gap * GAP_BINS).long().clamp(max=GAP_BINS - 1)


def balanced(cell: Tensor, n: int, random: torch.Generator) -> Tensor:
    """Numbers [n] of candidates, the same quota from every bin that is not empty; the bins nearest
    to no change take the remainder."""
    kinds, which, count = torch.unique(cell, return_inverse=True, return_counts=True)
    quota = torch.full_like(count, n // len(kinds))
    centre = (kinds // GAP_BINS - SCORE_BINS // 2).abs().argsort(stable=True)
    quota[centre[: n % len(kinds)]] += 1
    kind = torch.repeat_interleave(torch.arange(len(kinds)), quota)
    ordered = torch.argsort(which, stable=True)
    first = (count.cumsum(0) - count)[kind]
    within = (torch.rand(n, generator=random) * count[kind]).long()
    return ordered[first + within]
