"""Hops: relative progress between two frames, in [-1, 1].

Progress made counts as a fraction of the progress that was missing, progress lost as a fraction of
the progress that was achieved. Robo-Dopamine (2025): from progress p to progress q, both in [0, 1],

    h = (q - p) / (1 - p)  if q >= p,  else  (q - p) / p;      p <- p + (1 - p) h, or p + p h

so that composed hops never leave [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCORE_BINS = 25
GAP_BINS = 4
OVERSAMPLE = 80


def hop(before: Tensor, after: Tensor) -> Tensor:
    """Hops [N] in [-1, 1] from progress `before` [N] to `after` [N]; 0 for no change."""
    gain = after - before
    room = torch.where(gain >= 0, 1 - before, before)
    return torch.where(gain == 0, gain, gain / torch.where(gain == 0, 1.0, room)).clamp(-1, 1)


def compose(progress: Tensor, hops: Tensor) -> Tensor:
    """Progress [N] in [0, 1] after `hops` [N] from `progress` [N]."""
    room = torch.where(hops >= 0, 1 - progress, progress)
    return (progress + room * hops).clamp(0, 1)


def integrate(hops: Tensor) -> Tensor:
    """Progress [T + 1] along a trajectory that starts at 0, from its hops [T]; errors
    accumulate."""
    progress = hops.new_zeros(len(hops) + 1)
    for t, each in enumerate(hops):
        progress[t + 1] = compose(progress[t], each)
    return progress


def agreement(forward: Tensor, backward: Tensor, tolerance: float) -> Tensor:
    """Confidence exp(-((f - b) / tolerance)^2) [N] in two estimates [N]."""
    return torch.exp(-(((forward - backward) / tolerance) ** 2))


def potential(before: Tensor, after: Tensor, discount: Tensor) -> Tensor:
    """F = gamma^k Phi(s') - Phi(s), [N]: potential-based shaping."""
    return discount * after - before


def gain(before: Tensor, after: Tensor, discount: Tensor) -> Tensor:
    """Phi(s') - Phi(s), [N], also at a termination: changes the optimal policy. Standing still
    costs nothing (with a potential it does), and progress is rewarded even if success is never
    reached, which exploration from scratch needs: a potential gives all policies without success
    the same return."""
    return after - before


def level(before: Tensor, after: Tensor, discount: Tensor) -> Tensor:
    """Phi(s') - 1, [N]: at most 0, so that reaching the goal soon is optimal, and staying near it
    is not worth more than ending the episode there."""
    return after - 1


SHAPINGS = {"potential": potential, "gain": gain, "level": level}


@dataclass(frozen=True)
class Frames:
    """Frames of several episodes, concatenated: `episode` [N] (int64), `place` [N] in [0, 1]
    (relative time in the episode), `progress` [N] (0 throughout in failed episodes)."""

    episode: Tensor
    place: Tensor
    progress: Tensor

    def __len__(self) -> int:
        return len(self.episode)

    def followed_by(self, other: Frames) -> Frames:
        """These frames, then those of further episodes."""
        count = int(self.episode.max()) + 1
        return Frames(
            torch.cat([self.episode, other.episode + count]),
            torch.cat([self.place, other.place]),
            torch.cat([self.progress, other.progress]),
        )


def linear_progress(length: Tensor, succeeds: bool = True) -> Frames:
    """Linear progress i / (M - 1) over episodes of `length` [E] frames, at least 2 each; 0
    throughout unless they succeed."""
    episode = torch.repeat_interleave(torch.arange(len(length)), length)
    start = (length.cumsum(0) - length)[episode]
    place = (torch.arange(len(episode)) - start) / (length[episode] - 1)
    return Frames(episode, place, place if succeeds else torch.zeros_like(place))


@dataclass(frozen=True)
class Pairs:
    """`before`, `after` [n]: indices of frames; `label` [n]: the hop between them."""

    before: Tensor
    after: Tensor
    label: Tensor


def pairs(frames: Frames, n: int, zero: float, cross: float, random: torch.Generator) -> Pairs:
    """`n` training pairs: a fraction `zero` of a frame with itself, the others balanced over bins
    of the hop and of the time difference. A fraction `cross` of the candidates is of two episodes,
    the others of one."""
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
    """Bin [N] (int64) of each candidate: its hop in [-1, 1] and its time difference in [0, 1]."""
    score = ((label + 1) / 2 * SCORE_BINS).long().clamp(max=SCORE_BINS - 1)
    return score * GAP_BINS + (gap * GAP_BINS).long().clamp(max=GAP_BINS - 1)


def balanced(cell: Tensor, n: int, random: torch.Generator) -> Tensor:
    """Indices [n] of candidates, equally many from every non-empty bin; the bins nearest to no
    change get the remainder."""
    kinds, which, count = torch.unique(cell, return_inverse=True, return_counts=True)
    quota = torch.full_like(count, n // len(kinds))
    centre = (kinds // GAP_BINS - SCORE_BINS // 2).abs().argsort(stable=True)
    quota[centre[: n % len(kinds)]] += 1
    kind = torch.repeat_interleave(torch.arange(len(kinds)), quota)
    ordered = torch.argsort(which, stable=True)
    first = (count.cumsum(0) - count)[kind]
    within = (torch.rand(n, generator=random) * count[kind]).long()
    return ordered[first + within]
