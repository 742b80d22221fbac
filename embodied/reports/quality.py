"""What is in a dataset: trajectory quality (TQ) and state-action coverage (SACo).

Schweighofer et al., "A dataset perspective on offline reinforcement learning" (2022):

    TQ = (mean return - random) / (best - random),   SACo = u(D) / u(D_ref)

u counts distinct pairs of observation and action. D_ref is the replay buffer of an online run of
the same length, `random` and `best` are the returns of random actions and of the best policy known.
Numbers are put into `cells` equal cells between their limits in D_ref. Vectors of more than
`most` numbers are first projected to their `kept` principal components, as otherwise all pairs are
distinct. Pictures and points are not counted.

`embodied.buffers.weighted.positive_variance` of the returns says how much weighting by return may
add (Hong et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.buffers.weighted import Config as ReturnConfig
from embodied.buffers.weighted import Return, positive_variance, returns
from embodied.core.bounds import Count, Number
from embodied.core.build import ConfigError
from embodied.core.spec import hidden
from embodied.datasets.lerobot.reader import Episodes

MOST_CELLS = 100  # along each axis
LARGEST = 64  # numbers of an observation that is counted
AT_BOUND = 0.99  # of the action range


@dataclass(frozen=True)
class Config:
    """Settings of the quality of a dataset."""

    random: Number | None = None  # mean return of random actions (null: the lowest recorded one)
    best: Number | None = None  # of the best policy known (null: the highest recorded one)
    cells: Count | None = None  # along each axis (null: chosen by the reference, else 100)
    most: Count = 8  # numbers of a vector that is not projected
    kept: Count = 4  # principal components that it is projected to


@dataclass(frozen=True)
class Quality:
    """`tq`; `distinct` u(D) and `reference` u(D_ref); `positive_variance` of the returns;
    `effective`: the effective share of the episodes with weighting=return; `at_bounds`: the share
    of action elements there (None: there are no bounds); `terminated`: the share of episodes."""

    episodes: int
    steps: int
    mean: float
    random: float
    best: float
    distinct: int
    reference: int
    positive_variance: float
    effective: float
    at_bounds: float | None
    terminated: float

    @property
    def tq(self) -> float | None:
        """None where `random` and `best` are the same, as all returns are."""
        spread = self.best - self.random
        return (self.mean - self.random) / spread if spread else None

    @property
    def saco(self) -> float:
        return self.distinct / self.reference

    @property
    def log_saco(self) -> float:
        return math.log(self.distinct) / max(math.log(self.reference), 1e-9)

    def rows(self) -> list[tuple[str, str]]:
        counted = f"{self.distinct:,} distinct, {self.reference:,} in the reference"
        quality = f"unknown: all returns are {self.best:.4g}, give random= and best="
        if self.tq is not None:
            quality = f"{self.tq:.2f} (0: return {self.random:.4g}, 1: return {self.best:.4g})"
        found = [
            ("TQ", quality),
            ("SACo", f"{self.saco:.2f}, of logarithms {self.log_saco:.2f} ({counted})"),
            ("positive-sided variance of the return", f"{self.positive_variance:.4g}"),
            ("effective episodes with weighting=return", f"{self.effective:.0%}"),
            ("episodes that terminated", f"{self.terminated:.0%}"),
        ]
        if self.at_bounds is not None:
            found.append(("actions at their bounds", f"{self.at_bounds:.1%}"))
        return found


def quality(episodes: Episodes, config: Config, reference: Episodes | None = None) -> Quality:
    """The quality of `episodes`. Without a `reference`, which has the same spec, its limits are
    their own, and it counts every step as distinct. ConfigError if nothing can be counted."""
    whole = returns(episodes)
    mean = whole.mean().item()
    random = whole.min().item() if config.random is None else config.random
    best = whole.max().item() if config.best is None else config.best
    parts = [vectors(episodes)] if reference is None else [vectors(episodes), vectors(reference)]
    cells = config.cells or (MOST_CELLS if reference is None else cells_for(parts[-1], config))
    numbers = [distinct(part, parts[-1], cells, config) for part in parts]
    weight = Return(ReturnConfig())(episodes)
    ends = episodes.start + episodes.length - 1
    act, at_bounds = episodes.spec.act, None
    if (act.low, act.high) == (-1.0, 1.0):
        at_bounds = (episodes.steps["action"].abs() >= AT_BOUND).double().mean().item()
    return Quality(
        episodes=len(episodes),
        steps=len(parts[0]),
        mean=mean,
        random=random,
        best=best,
        distinct=numbers[0],
        reference=len(parts[0]) if reference is None else numbers[1],
        positive_variance=positive_variance(episodes),
        effective=(weight.sum().square() / weight.square().sum()).item() / len(episodes),
        at_bounds=at_bounds,
        terminated=episodes.steps["terminated"][ends].double().mean().item(),
    )


def vectors(episodes: Episodes) -> Tensor:
    """The observations and the action of every step as one vector, [N, D] (float64)."""
    leaves = episodes.spec.obs.items()
    seen = [
        f"obs/{name}"
        for name, leaf in leaves
        if not (hidden(name) or leaf.is_picture or leaf.is_points or leaf.is_text)
        and leaf.size <= LARGEST
    ]
    if not seen:
        raise ConfigError("these recordings have no observation in numbers to count")
    columns: Sequence[Tensor] = [episodes.steps[key] for key in (*seen, "action")]
    return torch.cat([column.double().reshape(len(column), -1) for column in columns], 1)


def cells_for(reference: Tensor, config: Config) -> int:
    """Cells of each number, at most 100 and so large that half of `reference` [M, D] or more shares
    one: where no two steps do, the number of distinct ones is the number of steps."""
    cells = MOST_CELLS
    while cells > 2 and distinct(reference, reference, cells, config) > len(reference) / 2:
        cells //= 2
    return cells


def distinct(pairs: Tensor, reference: Tensor, cells: int, config: Config) -> int:
    """How many of `pairs` [N, D] are in different ones of the cells, `cells` along each axis, whose
    limits are those of `reference` [M, D]; cells beyond them count too."""
    if reference.shape[1] > config.most:
        mean, std = reference.mean(0), reference.std(0, correction=0).clamp(min=1e-9)
        standard = (reference - mean) / std
        _, directions = torch.linalg.eigh(standard.T @ standard)
        main = directions[:, -config.kept :]
        pairs, reference = (pairs - mean) / std @ main, standard @ main
    low, high = reference.amin(0), reference.amax(0)
    cell = (pairs - low) / (high - low).clamp(min=1e-9) * cells
    inside = cell.floor() - (cell == cells).double()  # the highest is in the last one
    return len(torch.unique(inside.long(), dim=0))
