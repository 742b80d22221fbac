"""Meta-ACL (AGAIN): trains a new student with the curriculum of a similar past student.

Portelas, Romac, Hofmann and Oudeyer, "Meta automatic curriculum learning", 2020. After a pretest
with ALP-GMM, the expert is chosen: the past student with similar scores and the best final ones.
The components of its mixtures with high learning progress are sampled, stage by stage, besides the
new student's own.

The student archive is a folder of past students, one .npz file each.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from embodied.core.atomic_write import write_durably
from embodied.core.bounds import Count, Fraction, NonNegative
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers.tasks.alpgmm import AlpGmm, AlpGmmConfig
from embodied.teachers.tasks.gmm import draw, pick
from embodied.teachers.teacher import Floats

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


class HasTestScores(Protocol):
    """A student that can be evaluated on given tasks."""

    def tests(self, tasks: Floats) -> Floats:
        """Scores [n] in [0, 1] on task vectors `tasks` [n, D]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Config(AlpGmmConfig):
    """Settings of Meta-ACL.

    With `stepping` "return" a stage ends when the mean of the last `recent` scores in it reaches
    the past student's times `tolerance`; "none" uses no past student and adds this run to the
    archive. A student without `HasTestScores` is tested by its episodes near the tasks.
    """

    archive: str  # folder of past students
    name: str = ""  # name of this run in the archive; empty: its seed
    stepping: Literal["return", "none"] = "return"  # what ends a stage
    choice: Literal["knowledge", "random"] = "knowledge"  # which of the nearest past students
    neighbours: Count = 5  # nearest past students to choose from
    epoch: Count = 1_000  # episodes between tests
    pretest: Count = 1  # tests before a past student is chosen
    probes: Count = 64  # tasks of a test
    recent: Count = 50  # scores of a stage that are averaged
    tolerance: NonNegative = 1.0  # factor of the past student's score that has to be reached
    lively: NonNegative = 0.2  # least learning progress of a component that is kept
    refresh: Count = 100  # episodes between updates of the progress after the last stage
    random: Fraction = 0.1  # share of tasks of the whole box outside of the curriculum
    random_taught: Fraction = 0.02  # share of tasks of the whole box during the curriculum


class MetaAcl(AlpGmm):
    """The memo of an episode: the stage (or own fit) and component that it was sampled from."""

    in_order = True
    remembered = (
        *("own_fits", "history", "tests", "expert", "chosen", "stage", "finished"),
        *("scored", "recent_progress"),
    )

    def __init__(
        self, config: Config, spec: Spec, seed: int = 0, student: HasTestScores | None = None
    ) -> None:
        super().__init__(config, spec, seed)
        if not config.archive:
            raise ConfigError("teacher: set archive=FOLDER")
        self.student = student
        self.folder = Path(config.archive)
        self.known_students = {} if config.stepping == "none" else records(self.folder)
        self.file = self.folder / f"{config.name or f'seed-{seed}'}.npz"
        self.own_fits: list[dict[str, Any]] = []
        self.history: list[list[float]] = []  # of this run: point, score, own fit, component
        self.tests: list[list[float]] = []
        self.expert: list[Stage] = []
        self.chosen = ""
        self.stage = 0
        self.finished = False
        self.scored: list[float] = []  # scores of the current stage
        self.recent_progress: list[list[float]] = []  # component and progress, after the last stage

    def one(self) -> tuple[Floats, Any]:
        pools = self.pools()
        if not pools or self.random.random() < self.ratio():
            return self.random.random(len(self.space)), ["", -1, -1]
        drawn = [(pool, at) for pool in pools for at in range(len(pool[2]["alp"]))]
        weights = [float(pool["alp"][at]) for (_, _, pool), at in drawn]
        (kind, number, pool), component = drawn[pick(weights, self.random)]
        point = draw(pool, component, len(self.space), self.random)
        return point.clip(0, 1), [kind, number, component]

    def pools(self) -> list[tuple[str, int, Any]]:
        """The mixtures to sample from: (own or expert, number, `mean`, `cov` and `alp`)."""
        pools: list[tuple[str, int, Any]] = []
        if self.mixture is not None:
            own = {**self.mixture, "alp": np.array(self.utility)}
            pools.append(("own", len(self.own_fits) - 1, own))
        if self.expert:
            pools.append(("expert", self.stage, self.expert[self.stage]))
        return pools

    def ratio(self) -> float:
        taught = bool(self.expert) and not self.finished
        return self.config.random_taught if taught else self.config.random

    def take(self, point: Floats, score: float, memo: Any) -> None:
        kind, number, component = memo
        place = [float(number), float(component)] if kind == "own" else [-1.0, -1.0]
        self.history.append([*point.tolist(), score, *place])
        progress = self.progress(point, score)  # before this episode is added
        if kind == "expert":
            self.follow(number, component, score, progress)
        super().take(point, score, memo)
        if len(self.history) % self.config.epoch == 0:
            self.evaluate()

    def refit(self) -> None:
        before = self.fits
        super().refit()
        if self.fits > before and self.mixture is not None:
            self.own_fits.append({"at": len(self.history), **self.mixture})

    def follow(self, stage: int, component: int, score: float, progress: float) -> None:
        """Count an episode that was sampled from the expert's curriculum."""
        if self.finished:
            self.recent_progress.append([component, progress])
            if len(self.recent_progress) >= self.config.refresh:
                self.refreshed()
        elif stage == self.stage:
            self.scored = [*self.scored, score][-self.config.recent :]
            enough = self.config.tolerance * self.expert[self.stage]["score"]
            if len(self.scored) == self.config.recent and np.mean(self.scored) >= enough:
                self.step()

    def step(self) -> None:
        """Go to the next stage; after the last, its components are weighted by current progress."""
        self.scored = []
        if self.stage + 1 < len(self.expert):
            self.stage += 1
        else:
            self.finished = True

    def refreshed(self) -> None:
        """Update each component's progress to the mean over its last episodes."""
        rows = np.array(self.recent_progress)
        self.recent_progress = []
        alp = self.expert[self.stage]["alp"].copy()
        for component in np.unique(rows[:, 0]).astype(int):
            alp[component] = rows[rows[:, 0] == component, 1].mean()
        self.expert[self.stage] = {**self.expert[self.stage], "alp": alp}

    def evaluate(self) -> None:
        self.tests.append(self.test().tolist())
        if len(self.tests) == self.config.pretest and self.config.stepping != "none":
            self.choose_expert()
        if self.config.stepping == "none":
            self.record().write(self.file)

    def test(self) -> Floats:
        """Scores [n] at the test tasks: from the student, or the mean of the five nearest episodes
        of the last epoch."""
        places = probes(self.config.probes, len(self.space))
        if self.student is not None:
            return np.asarray(self.student.tests(self.space.to_env(places)), dtype=np.float64)
        d, rows = len(self.space), np.array(self.history[-self.config.epoch :])
        gaps = ((places[:, None] - rows[None, :, :d]) ** 2).sum(2)
        return rows[np.argsort(gaps, axis=1)[:, :5], d].mean(1)

    def choose_expert(self) -> None:
        plan = self.config
        test = np.array(self.tests[-1])
        like = {
            name: record
            for name, record in self.known_students.items()
            if record.points.shape[1] == len(self.space) and record.tests.shape[1] == len(test)
        }
        name = choose_expert(like, test, plan.pretest, plan.neighbours, plan.choice, self.random)
        self.expert = curriculum(like[name], plan.lively, plan.recent) if name else []
        self.chosen = name or ""
        if not self.expert:
            warnings.warn(
                f"teacher: no past student of {self.folder} has a curriculum for this task space "
                f"(components with a progress above {plan.lively:g}); ALP-GMM alone is used",
                stacklevel=2,
            )

    def record(self) -> Record:
        width, history = len(self.space), np.array(self.history)
        sizes = [len(each["weight"]) for each in self.own_fits]
        means = [each["mean"] for each in self.own_fits] or [np.zeros((0, width + 1))]
        covs = [each["cov"] for each in self.own_fits] or [np.zeros((0, width + 1, width + 1))]
        return Record(
            tests=np.array(self.tests),
            final=np.array(self.tests[-1]),
            at=np.array([each["at"] for each in self.own_fits], dtype=np.float64),
            sizes=np.array(sizes, dtype=np.float64),
            means=np.concatenate(means),
            covs=np.concatenate(covs),
            points=history[:, :width],
            scores=history[:, width],
            fit=history[:, width + 1],
            component=history[:, width + 2],
        )

    def metrics(self) -> dict[str, float]:
        taught = {"stage": float(self.stage), "stages": float(len(self.expert))}
        return {**super().metrics(), **taught, "finished": float(self.finished)}
