"""Teachers that sample tasks by learning progress, with Gaussian mixtures: ALP-GMM, Covar-GMM.

Every `every` episodes a mixture is fitted to their vectors (point, ..., progress). A component is
sampled in proportion to its progress, and the task is sampled from the component.

Mixtures have full covariances and are fitted by EM (Dempster, Laird and Rubin, 1977) for several
sizes. The number of components K minimises (Akaike, 1974)
AIC = 2 p - 2 log L, p = (K - 1) + K D + K D (D + 1) / 2.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from embodied.core.bounds import Count, Fraction
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats

Mixture = dict[str, Floats]
"""`weight` [K], `mean` [K, D], `cov` [K, D, D], as arrays, so that a teacher can save them."""

RIDGE = 1e-6  # added to the diagonal of every covariance, which keeps it positive definite
LLOYD = 5  # k-means iterations before the first E-step
PASSES = 100  # EM steps at most


def best(rows: Floats, sizes: Sequence[int], random: Generator) -> Mixture | None:
    """Fit mixtures with each number of components in `sizes` to the points `rows` [n, D] and return
    the one with the lowest AIC; None if no size has at least two points per component."""
    sizes = [size for size in sizes if len(rows) >= 2 * size]
    fits = [each for each in fit(rows, sizes, random) if np.isfinite(each[1])]
    if not fits:
        return None
    cost = [price(len(m["weight"]), rows.shape[1], likely) for m, likely in fits]
    return fits[int(np.argmin(cost))][0]


def price(size: int, width: int, likelihood: float) -> float:
    """AIC (lower is better) of a mixture of `size` components in `width` dimensions with the total
    log-`likelihood` of the points."""
    free = size - 1 + size * width + size * width * (width + 1) / 2
    return 2 * free - 2 * likelihood


def fit(rows: Floats, sizes: Sequence[int], random: Generator) -> list[tuple[Mixture, float]]:
    """One mixture per size (smaller if a component got no points), each with the total
    log-likelihood of `rows` [n, D] under it.

    All sizes are fitted in one batch, padded to the largest. A mixture has converged when an EM
    step improves the mean log-likelihood by less than 1e-3.
    """
    if not sizes:
        return []
    weight, mean, cov = _maximise(rows, cluster(rows, sizes, random, LLOYD))
    done: dict[int, tuple[Mixture, float]] = {}
    left, before = np.arange(len(sizes)), np.full(len(sizes), -np.inf)
    for turn in range(PASSES):
        share, likely = _expect(rows, weight, mean, cov)
        ends = (likely - before < 1e-3 * len(rows)) | (turn == PASSES - 1)
        for at in np.flatnonzero(ends):
            held = weight[at] > 0  # drop components without points
            kept = {"weight": weight[at, held], "mean": mean[at, held], "cov": cov[at, held]}
            done[int(left[at])] = (kept, float(likely[at]))
        left = left[~ends]
        before = likely[~ends]
        share = share[~ends]
        if not len(left):
            break
        weight, mean, cov = _maximise(rows, share)
    return [done[number] for number in range(len(sizes))]


def draw(mixture: Mixture, component: int, width: int, random: Generator) -> Floats:
    """Sample the first `width` dimensions of a component: a point [width]."""
    root = np.linalg.cholesky(mixture["cov"][component, :width, :width])
    return mixture["mean"][component, :width] + root @ random.standard_normal(width)


def cluster(rows: Floats, sizes: Sequence[int], random: Generator, passes: int) -> Floats:
    """Assignments [M, K, n] (0 or 1) of the points by k-means (Lloyd, 1982) with k-means++ centres
    (Arthur and Vassilvitskii, 2007)."""
    centres = np.full((len(sizes), max(sizes), rows.shape[1]), np.inf)
    for model, size in enumerate(sizes):
        centres[model, :size] = _apart(rows, size, random)
    for _ in range(passes):
        nearest = _nearest(rows, centres)
        count = nearest.sum(2)
        moved = (nearest @ rows) / np.maximum(count, 1)[..., None]
        centres = np.where((count > 0)[..., None], moved, centres)
    return _nearest(rows, centres)


def _apart(rows: Floats, size: int, random: Generator) -> Floats:
    """Initial centres: points sampled in proportion to their squared distance to the others."""
    chosen = [rows[random.integers(len(rows))]]
    gap = np.full(len(rows), np.inf)
    for _ in range(size - 1):
        gap = np.minimum(gap, ((rows - chosen[-1]) ** 2).sum(1))
        edge = np.cumsum(gap)
        place = np.searchsorted(edge, random.random() * edge[-1], side="right")
        chosen.append(rows[min(int(place), len(rows) - 1)])
    return np.stack(chosen)


def _nearest(rows: Floats, centres: Floats) -> Floats:
    """Assignments [M, K, n] (0 or 1) of each point to its nearest centre (the first in a tie)."""
    known = np.isfinite(centres[..., :1])
    safe = np.where(known, centres, 0.0)
    gap = (safe**2).sum(-1)[..., None] - 2 * safe @ rows.T
    gap = np.where(known, gap, np.inf)
    numbers = np.arange(centres.shape[1])[None, :, None]
    return (gap.argmin(1)[:, None] == numbers).astype(np.float64)


def _maximise(rows: Floats, share: Floats) -> tuple[Floats, Floats, Floats]:
    """M-step: weights [M, K], means [M, K, D] and covariances [M, K, D, D] from responsibilities
    `share` [M, K, n]."""
    count = share.sum(2)
    safe = np.maximum(count, 1e-10)[..., None]
    mean = share @ rows / safe
    off = rows - mean[:, :, None]
    cov = (share[..., None] * off).swapaxes(2, 3) @ off / safe[..., None]
    return count / len(rows), mean, cov + RIDGE * np.eye(rows.shape[1])


def _expect(rows: Floats, weight: Floats, mean: Floats, cov: Floats) -> tuple[Floats, Floats]:
    """E-step: responsibilities [M, K, n] of the components, and total log-likelihoods [M]."""
    root = np.linalg.inv(np.linalg.cholesky(cov))
    off = (rows - mean[:, :, None]) @ root.swapaxes(2, 3)
    volume = np.log(np.diagonal(root, axis1=2, axis2=3)).sum(2)
    constant = volume - 0.5 * rows.shape[1] * math.log(2 * math.pi)
    empty = np.where(weight > 0, 0.0, -np.inf)
    log = np.log(np.maximum(weight, 1e-300)) + empty + constant
    joint = log[..., None] - 0.5 * np.einsum("mknd,mknd->mkn", off, off)
    top = joint.max(1)
    mass = np.exp(joint - top[:, None])
    total = mass.sum(1)
    return mass / total[:, None], (np.log(total) + top).sum(1)


@dataclass(frozen=True, kw_only=True)
class GmmConfig(teacher.Config):
    """Settings of the mixture. Each fit uses the newest `every` episodes only."""

    every: Count = 250  # episodes between fits
    random: Fraction = 0.2  # share of tasks that are sampled uniformly from the whole box
    fewest: Count = 2  # least number of components
    most: Count = 10  # largest number of components


class Fitted(teacher.Teacher):
    """Subclasses define the vectors (`row`) and the weights of components (`worth`). Before the
    first fit, tasks are sampled uniformly."""

    remembered = ("rows", "fits", "mixture", "utility")

    def __init__(self, config: GmmConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        if config.fewest > config.most or config.every < 2 * config.fewest:
            raise ConfigError(
                f"teacher: fewest={config.fewest} to most={config.most} components cannot be "
                f"fitted to every={config.every} episodes; teacher.every should be at least "
                "two episodes a component"
            )
        self.rows: list[list[float]] = []
        self.fits = 0
        self.mixture: Mixture | None = None
        self.utility: list[float] = []

    @abstractmethod
    def row(self, point: Floats, score: float) -> list[float]:
        """The vector of an episode that the mixture is fitted to; it begins with `point` [d]."""

    @abstractmethod
    def worth(self, mixture: Mixture) -> Floats:
        """Unnormalised sampling weights [K] of the components, at least 0."""

    def one(self) -> tuple[Floats, Any]:
        """Sample a point [d]; also returns its component (None: the whole box)."""
        fitted, width = self.mixture, len(self.space)
        if fitted is None or self.random.random() < self.config.random:
            return self.random.random(width), None
        component = pick(self.utility, self.random)
        return draw(fitted, component, width, self.random).clip(0, 1), component

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for point, score, memo in zip(points, scores.tolist(), memos, strict=True):
            self.take(point, score, memo)

    def take(self, point: Floats, score: float, memo: Any) -> None:
        """Add one finished episode; refit once there are `every`."""
        self.rows.append(self.row(point, score))
        if len(self.rows) >= self.config.every:
            self.refit()
            self.rows = []

    def refit(self) -> None:
        sizes = range(self.config.fewest, self.config.most + 1)
        rows = np.array(self.rows)
        found = best(rows, sizes, self.random)
        if found is not None:
            self.mixture, self.utility = found, self.worth(found).tolist()
            self.fits += 1

    def metrics(self) -> dict[str, float]:
        components = len(self.utility)
        mean = sum(self.utility) / components if components else 0.0
        return {"fits": float(self.fits), "components": float(components), "progress": mean}


def pick(weights: list[float], random: np.random.Generator) -> int:
    """Sample an index in proportion to `weights`; uniformly if all weights are 0."""
    edge = np.cumsum(weights)
    if edge[-1] <= 0:
        return int(random.integers(len(weights)))
    return min(int(np.searchsorted(edge, random.random() * edge[-1], "right")), len(weights) - 1)
