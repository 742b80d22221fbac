"""Again: a new student is taught with the curriculum of a past one that was like it.

Source: Portelas, Romac, Hofmann and Oudeyer, "Meta automatic curriculum learning", 2020 (AGAIN).
After a pretest with ALP-GMM the past student is chosen whose scores were like the new one's and who
came furthest; the lively components of its mixtures, stage by stage, are played beside the new
student's own.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers.students.student_archive import (
    Record,
    Stage,
    choose,
    curriculum,
    probes,
    records,
)
from embodied.teachers.task_space import Floats
from embodied.teachers.tasks import alpgmm, gmm
from embodied.teachers.tasks.gmm_teacher import pick


class Tested(Protocol):
    """A student that can be examined beside its episodes."""

    def tests(self, tasks: Floats) -> Floats:
        """Scores [n] in [0, 1] at the world's task vectors `tasks` [n, D]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Config(alpgmm.Config):
    """`classroom`: the folder of past students. `stepping` to the next stage: "return" when the
    mean of the last `recent` scores in this one reaches the past student's times `tolerance`;
    "time" every `stay` episodes; "pool" plays all stages at once; "none" follows nobody.

    `join`: this run becomes one of the classroom's (always with "none"), as `pupil` (its seed,
    without a name). The test is at `probes` tasks after every `epoch` episodes; a student that is
    not `Tested` is judged by its episodes near them. Before `pretest` epochs and after the last
    stage `random` of the tasks come from the whole box, between them `random_taught`.
    """

    classroom: str
    pupil: str = ""
    join: bool = False
    stepping: Literal["return", "time", "pool", "none"] = "return"
    choice: Literal["knowledge", "random"] = "knowledge"
    neighbours: int = 5
    epoch: int = 1_000
    pretest: int = 1
    probes: int = 64
    recent: int = 50
    tolerance: float = 1.0
    stay: int = 250
    lively: float = 0.2
    refresh: int = 100
    random: float = 0.1
    random_taught: float = 0.02


class Again(alpgmm.AlpGmm):
    """Tickets say which stage (or own fit) and component an episode was drawn from."""

    remembered = (
        *alpgmm.AlpGmm.remembered,
        *("album", "story", "tests", "expert", "chosen", "stage", "finished"),
        *("scored", "stayed", "lately"),
    )

    def __init__(
        self, config: Config, spec: Spec, seed: int = 0, student: Tested | None = None
    ) -> None:
        super().__init__(config, spec, seed)
        if not config.classroom or config.pretest < 1 or config.epoch < 1:
            raise ConfigError("teacher: needs classroom=FOLDER, pretest >= 1 and epoch >= 1")
        self.plan, self.student = config, student
        self.folder = Path(config.classroom)
        self.known_students = {} if config.stepping == "none" else records(self.folder)
        self.file = self.folder / f"{config.pupil or f'seed-{seed}'}.npz"
        self.album: list[dict[str, Any]] = []  # own fits
        self.story: list[list[float]] = []  # own episodes
        self.tests: list[list[float]] = []
        self.expert: list[Stage] = []
        self.chosen, self.stage, self.finished = "", 0, False
        self.scored: list[float] = []  # in this stage
        self.stayed = 0
        self.lately: list[list[float]] = []  # component and progress, after the last stage

    def one(self) -> tuple[Floats, Any]:
        pools = self.pools()
        if not pools or self.random.random() < self.ratio():
            return self.random.random(len(self.space)), ["", -1, -1]
        drawn = [(pool, at) for pool in pools for at in range(len(pool[2]["alp"]))]
        weights = [float(pool["alp"][at]) for (_, _, pool), at in drawn]
        (kind, number, pool), component = drawn[pick(weights, self.random)]
        point = gmm.draw(pool, component, len(self.space), self.random)
        return point.clip(0, 1), [kind, number, component]

    def pools(self) -> list[tuple[str, int, Any]]:
        """What components are drawn from: (whose, which, its `mean`, `cov` and `alp`)."""
        pools: list[tuple[str, int, Any]] = []
        if self.mixture is not None:
            own = {**self.mixture, "alp": np.array(self.utility)}
            pools.append(("own", len(self.album) - 1, own))
        if self.expert and self.plan.stepping == "pool":
            pools += [("expert", number, stage) for number, stage in enumerate(self.expert)]
        elif self.expert:
            pools.append(("expert", self.stage, self.expert[self.stage]))
        return pools

    def ratio(self) -> float:
        taught = bool(self.expert) and not self.finished
        return self.plan.random_taught if taught else self.plan.random

    def take(self, point: Floats, score: float, memo: Any) -> None:
        kind, number, component = memo
        own = kind == "own"
        place = [float(number), float(component)] if own else [-1.0, -1.0]
        self.story.append([*point.tolist(), score, *place])
        progress = self.progress(point, score)  # before this episode is itself known
        if kind == "expert":
            self.follow(number, component, score, progress)
        super().take(point, score, memo)
        if self.plan.stepping == "time" and self.expert:
            self.stayed += 1
            if self.stayed >= self.plan.stay:
                self.step()
        if len(self.story) % self.plan.epoch == 0:
            self.examine()

    def refit(self) -> None:
        before = self.fits
        super().refit()
        if self.fits > before and self.mixture is not None:
            self.album.append({"at": len(self.story), **self.mixture})

    def follow(self, stage: int, component: int, score: float, progress: float) -> None:
        """An episode of the expert's."""
        if self.finished:
            self.lately.append([component, progress])
            if len(self.lately) >= self.plan.refresh:
                self.refreshed()
        elif self.plan.stepping == "return" and stage == self.stage:
            self.scored = [*self.scored, score][-self.plan.recent :]
            enough = self.plan.tolerance * self.expert[self.stage]["score"]
            if len(self.scored) == self.plan.recent and np.mean(self.scored) >= enough:
                self.step()

    def step(self) -> None:
        """To the next stage; after the last, its components live on by their present progress."""
        self.scored, self.stayed = [], 0
        if self.stage + 1 < len(self.expert):
            self.stage += 1
        else:
            self.finished = True

    def refreshed(self) -> None:
        """The mean progress of the last episodes of each component that had some."""
        rows, self.lately = np.array(self.lately), []
        alp = self.expert[self.stage]["alp"].copy()
        for component in np.unique(rows[:, 0]).astype(int):
            alp[component] = rows[rows[:, 0] == component, 1].mean()
        self.expert[self.stage] = {**self.expert[self.stage], "alp": alp}

    def examine(self) -> None:
        """A test epoch is over."""
        self.tests.append(self.test().tolist())
        if len(self.tests) == self.plan.pretest and self.plan.stepping != "none":
            self.enrol()
        if self.plan.join or self.plan.stepping == "none":
            self.record().write(self.file)

    def test(self) -> Floats:
        """Scores [n] at the probes: asked, or from the five nearest of the last epoch's
        episodes."""
        places = probes(self.plan.probes, len(self.space))
        if self.student is not None:
            return np.asarray(self.student.tests(self.space.to_env(places)), dtype=np.float64)
        d, rows = len(self.space), np.array(self.story[-self.plan.epoch :])
        gaps = ((places[:, None] - rows[None, :, :d]) ** 2).sum(2)
        return rows[np.argsort(gaps, axis=1)[:, :5], d].mean(1)

    def enrol(self) -> None:
        """Choose whom to follow."""
        plan, known = self.plan, self.known_students
        test = np.array(self.tests[-1])
        like = {name: r for name, r in known.items() if fits(r, len(self.space), len(test))}
        name = choose(like, test, plan.pretest, plan.neighbours, plan.choice, self.random)
        self.expert = curriculum(like[name], plan.lively, plan.recent) if name else []
        self.chosen = name or ""
        if not self.expert:
            warnings.warn(
                f"teacher: no past student of {self.folder} has a curriculum for this task space "
                f"(components livelier than {plan.lively:g}); this one is taught by its own "
                "progress alone",
                stacklevel=2,
            )

    def record(self) -> Record:
        """This run so far, as a past student."""
        width, story = len(self.space), np.array(self.story)
        sizes = [len(each["weight"]) for each in self.album]
        means = [each["mean"] for each in self.album] or [np.zeros((0, width + 1))]
        covs = [each["cov"] for each in self.album] or [np.zeros((0, width + 1, width + 1))]
        return Record(
            tests=np.array(self.tests),
            final=np.array(self.tests[-1]),
            at=np.array([each["at"] for each in self.album], dtype=np.float64),
            sizes=np.array(sizes, dtype=np.float64),
            means=np.concatenate(means),
            covs=np.concatenate(covs),
            points=story[:, :width],
            scores=story[:, width],
            fit=story[:, width + 1],
            component=story[:, width + 2],
        )

    def metrics(self) -> dict[str, float]:
        taught = {"stage": float(self.stage), "stages": float(len(self.expert))}
        return {**super().metrics(), **taught, "finished": float(self.finished)}


def fits(record: Record, d: int, n: int) -> bool:
    """Whether a past student had tasks of `d` elements and was tested at `n` of them."""
    return record.points.shape[1] == d and record.tests.shape[1] == n
