"""Classroom: a folder of past students, one compact file each, and the curriculum of one of them.

Source: Portelas, Romac, Hofmann and Oudeyer, "Meta automatic curriculum learning", 2020.
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
"""One mixture of an expert curriculum: `mean` [K, d + 1], `cov` [K, d + 1, d + 1], `alp` [K], and
`score`, what its own student had come to in it."""

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)


@dataclass(frozen=True)
class Record:
    """A past student: `tests` [epochs, n], its scores at the probes after each epoch, `final` [n];
    its fits, stacked: `at` [F] (episodes before each), `sizes` [F], `means` [sum, d + 1], `covs`;
    its episodes: `points` [N, d], `scores` [N], and the `fit` [N] and `component` [N] that each was
    drawn from (-1: none)."""

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
        """All of it or nothing."""
        arrays = {name: value.astype(np.float32) for name, value in vars(self).items()}
        write_durably(file, lambda sink: np.savez_compressed(sink, allow_pickle=False, **arrays))


def records(folder: Path) -> dict[str, Record]:
    """The students in a classroom by name; ConfigError where there are none."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise ConfigError(
            f"no past students in the classroom {folder}: add some with "
            f"teacher.stepping=none teacher.classroom={folder} (one run each, by seed)"
        )
    found: dict[str, Record] = {}
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            found[file.stem] = Record(**{n: arrays[n].astype(np.float64) for n in arrays.files})
    return found


def probes(n: int, d: int) -> Floats:
    """`n` points [n, d] that fill the cube evenly (Halton): where every student is tested."""
    numbers = np.arange(1, n + 1)
    return np.stack([_reversed_digits(numbers, PRIMES[i % len(PRIMES)]) for i in range(d)], 1)


def _reversed_digits(numbers: Any, base: int) -> Floats:
    left, value, unit = numbers.copy(), np.zeros(len(numbers)), 1.0
    while left.any():
        unit /= base
        value += unit * (left % base)
        left //= base
    return value


def choose(
    known: dict[str, Record],
    test: Floats,
    epoch: int,
    neighbours: int,
    by: Literal["knowledge", "random"],
    random: np.random.Generator,
) -> str | None:
    """The past student to follow: of the `neighbours` whose scores after as many epochs were most
    like `test` [n], the one that came furthest. None where no student got to that epoch."""
    fit = {name: r for name, r in known.items() if len(r.tests) >= epoch and len(r.final)}
    if not fit:
        return None
    if by == "random":
        return sorted(fit)[int(random.integers(len(fit)))]
    gaps = {name: float(np.linalg.norm(r.tests[epoch - 1] - test)) for name, r in fit.items()}
    nearest = sorted(gaps, key=lambda name: gaps[name])[:neighbours]
    return max(nearest, key=lambda name: float(fit[name].final.sum()))


def curriculum(record: Record, lively: float, last: int) -> list[Stage]:
    """A student's mixtures, in order, of components with a mean progress above `lively`; each with
    the mean of the `last` scores that its student had in those. Mixtures without one are left
    out."""
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
