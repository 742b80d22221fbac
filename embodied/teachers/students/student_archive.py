"""Student archive of Meta-ACL: a folder of past students, one .npz file each.

Portelas, Romac, Hofmann and Oudeyer, "Meta automatic curriculum learning", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embodied.core.atomic_write import write_durably
from embodied.core.build import ConfigError
from embodied.teachers.task_space import Floats

Stage = dict[str, Any]
"""One mixture of an expert curriculum: `mean` [K, d + 1], `cov` [K, d + 1, d + 1], `alp` [K] (the
absolute learning progress), and `score`, the mean score of the past student in it."""

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)


@dataclass(frozen=True)
class Record:
    """A past student: `tests` [epochs, n], its scores at the test tasks after each epoch; `final`
    [n], the last ones. Its fitted mixtures, concatenated: `at` [F] (episodes before each fit),
    `sizes` [F], `means` [sum, d + 1], `covs`. Its episodes: `points` [N, d], `scores` [N], and the
    `fit` [N] and `component` [N] each was sampled from (-1: none)."""

    tests: Floats
    final: Floats
    at: Floats
    sizes: Floats
    means: Floats
    covs: Floats
    points: Floats
    scores: Floats
    fit: Floats
    component: Floats

    def write(self, file: Path) -> None:
        """Write the file atomically."""
        arrays = {name: value.astype(np.float32) for name, value in vars(self).items()}
        write_durably(file, lambda sink: np.savez_compressed(sink, allow_pickle=False, **arrays))


def records(folder: Path) -> dict[str, Record]:
    """The past students in `folder`, by name; ConfigError if there are none."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise ConfigError(
            f"no past students in the archive {folder}: add some with "
            f"teacher.stepping=none teacher.archive={folder} (one run each, by seed)"
        )
    found: dict[str, Record] = {}
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            found[file.stem] = Record(**{n: arrays[n].astype(np.float64) for n in arrays.files})
    return found


def probes(n: int, d: int) -> Floats:
    """The n test tasks [n, d]: a Halton sequence in the unit cube."""
    numbers = np.arange(1, n + 1)
    return np.stack([_reversed_digits(numbers, PRIMES[i % len(PRIMES)]) for i in range(d)], 1)


def _reversed_digits(numbers: Any, base: int) -> Floats:
    left = numbers.copy()
    value = np.zeros(len(numbers))
    unit = 1.0
    while left.any():
        unit /= base
        value += unit * (left % base)
        left //= base
    return value


def choose_expert(
    known: dict[str, Record],
    test: Floats,
    epoch: int,
    neighbours: int,
    by: Literal["knowledge", "random"],
    random: np.random.Generator,
) -> str | None:
    """The name of the past student to imitate: of the `neighbours` whose scores after `epoch` tests
    are closest to `test` [n], the one with the highest final scores. None if no past student has
    reached that epoch."""
    fit = {name: r for name, r in known.items() if len(r.tests) >= epoch and len(r.final)}
    if not fit:
        return None
    if by == "random":
        return sorted(fit)[int(random.integers(len(fit)))]
    gaps = {name: float(np.linalg.norm(r.tests[epoch - 1] - test)) for name, r in fit.items()}
    nearest = sorted(gaps, key=lambda name: gaps[name])[:neighbours]
    return max(nearest, key=lambda name: float(fit[name].final.sum()))


def curriculum(record: Record, lively: float, last: int) -> list[Stage]:
    """The mixtures of a past student, in order, reduced to components with a mean learning progress
    above `lively`; each with the mean of the student's `last` scores in them. Mixtures without such
    a component are left out."""
    stages: list[Stage] = []
    ends = np.cumsum(record.sizes).astype(int)
    for number, (end, size) in enumerate(zip(ends, record.sizes.astype(int), strict=True)):
        means, covs = record.means[end - size : end], record.covs[end - size : end]
        kept = np.flatnonzero(means[:, -1] > lively)
        own = (record.fit == number) & np.isin(record.component, kept)
        if len(kept) and own.any():
            score = float(record.scores[own][-last:].mean())
            alp = means[kept, -1].copy()
            stages.append({"mean": means[kept], "cov": covs[kept], "alp": alp, "score": score})
    return stages
