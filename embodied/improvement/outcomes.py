"""Statistics of episodes that were played from the same initial states with several noises.

`outcomes` [K, S] are those of K draws of the noise in S states: 0 and 1, or returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist

import torch
from torch import Tensor

from embodied.improvement.advice import Region

FEWEST = 5  # states of a third whose score is looked at
SHOWN = 5  # regions


def best_of(outcomes: Tensor, k: int) -> float:
    """The mean over states of the best of `k` draws, without bias (pass@k; Chen et al., 2021).

    With the outcomes of a state in ascending order x_1 .. x_n, the mean of the best over all
    subsets of k is sum_i C(i - 1, k - 1) x_i / C(n, k).
    """
    n = len(outcomes)
    shares = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    ordered = outcomes.double().sort(0).values
    return (torch.tensor(shares, dtype=torch.float64) @ ordered).mean().item()


def chosen_noise(outcomes: Tensor, groupings: Sequence[Tensor]) -> float:
    """The score of one noise for each group of states, in states that did not choose it.

    Each of `groupings` [S] (int64, below 3) numbers the group of each state. Every second state
    chooses the grouping and its noises, the others are the score, and the other way round. The
    grouping is chosen by scores that leave one state out: many groups fit anything.
    """
    states = outcomes.shape[1]
    scores: list[float] = []
    for half in (0, 1):
        train = torch.arange(states) % 2 == half
        found: list[tuple[float, float]] = []
        for groups in groupings:
            sums = torch.stack([outcomes[:, train & (groups == g)].sum(1) for g in range(3)])
            others = sums[groups].T - outcomes * train  # a state does not choose for itself
            played = outcomes[others.argmax(0), torch.arange(states)].double()
            found.append((played[train].mean().item(), played[~train].mean().item()))
        scores.append(max(found, key=lambda pair: pair[0])[1])
    return sum(scores) / 2


def thirds(values: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """The third [S] (0, 1, 2) in which each of `values` [S] is, and the edges between them."""
    edges = values.double().quantile(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    return torch.bucketize(values.double(), edges), (edges[0].item(), edges[1].item())


def regions(columns: Mapping[str, Tensor], outcomes: Tensor) -> tuple[Region, ...]:
    """The numbers `columns` [S] of the initial states on whose third the outcomes [S] depend.

    The largest difference between two thirds has to be larger than chance makes one of all
    differences that are looked at, with a probability of 5% (Bonferroni).
    """
    limit = NormalDist().inv_cdf(1 - 0.05 / (2 * 3 * max(1, len(columns))))
    deviation = outcomes.double().std(correction=0).item()
    found: list[Region] = []
    for name, values in columns.items():
        groups, edges = thirds(values)
        parts = [outcomes[groups == g].double() for g in range(3)]
        known = [part for part in parts if len(part) >= FEWEST]
        differ = [
            abs(a.mean() - b.mean()) > limit * deviation * (1 / len(a) + 1 / len(b)) ** 0.5
            for a, b in combinations(known, 2)
        ]
        if any(differ):
            scores = [p.mean().item() if len(p) >= FEWEST else None for p in parts]
            found.append(Region(name, edges, (scores[0], scores[1], scores[2])))
    return tuple(sorted(found, key=lambda each: each.worst - each.best)[:SHOWN])
