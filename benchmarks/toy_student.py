"""Toy student: a simulated student without a network, to compare teachers in seconds.

    python -m benchmarks.toy_student teacher=alpgmm cells=10 episodes=20000 seed=0
    out=DIR

The toy environment of ALP-GMM (Portelas et al., 2019). The task space is a grid of `cells`^2 cells,
each with a competence c from 0 to 100. An episode in a cell increases c by 1 if the cell is the
first corner or if a previous neighbour (each index equal or one less) has c >= 75. Its return is
c / 100; it succeeds if c >= 50. A cell counts as unlocked if c > 75. Uniform sampling unlocks 4% of
100 cells in 20,000 episodes. `teacher.KEY=VALUE` changes a setting of the teacher.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from torch import Tensor

from embodied import configs
from embodied.core.bounds import Bound, Count, CountOrZero
from embodied.core.build import ConfigError, build, nearest, parse
from embodied.core.spec import Leaf, Spec
from embodied.teachers.plots import draw
from embodied.teachers.teacher import Floats, Outcome, Teacher

OPEN, TOP = 75, 100
PASSED = 50  # competence from which episodes succeed


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the toy student."""

    teacher: str = "uniform"  # name of the teacher
    cells: Count = 10  # cells of each dimension
    dimensions: Count = 2  # task dimensions with an effect
    turn: Annotated[int, Bound(-1)] = 0  # quarter turns of the grid; -1: given by the seed
    rows: Count = 1  # episodes in parallel
    episodes: Count = 20_000  # episodes in all
    points: Count = 20  # lines of metrics
    picture: bool = False  # plot the sampled tasks (tasks.png)
    seed: CountOrZero = 0  # seed of student and teacher
    out: Path = Path("outputs/toy")  # folder of the results
    settings: dict[str, Any] = field(default_factory=dict)  # settings of the teacher


class Student:
    """A grid of competences; the episodes of one `play` call are simulated one after the other."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.shape = (config.cells,) * config.dimensions
        self.competence = np.zeros(self.shape, np.int64)
        self.before = [each for each in product((0, -1), repeat=config.dimensions) if any(each)]
        self.turn = config.turn if config.turn >= 0 else config.seed % 4
        names = tuple(f"x{i}" for i in range(config.dimensions))
        self.task = Leaf((len(names),), low=0.0, high=1.0, names=names)
        self.spec = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), 1.0, self.task)

    def cell(self, task: Floats) -> tuple[int, ...]:
        """The cell of a task vector [D]."""
        task = turned(task, self.turn)
        return tuple(min(int(x * self.config.cells), self.config.cells - 1) for x in task)

    def play(self, tasks: Tensor) -> Outcome:
        """Simulate episodes with task vectors `tasks` [n, D]."""
        levels = [self.episode(self.cell(task)) for task in tasks.double().numpy()]
        ret, length = torch.tensor(levels).double() / TOP, torch.ones(len(levels))
        return Outcome(ret, torch.tensor([c >= PASSED for c in levels]) + 0.0, length)

    def episode(self, cell: tuple[int, ...]) -> int:
        """Simulate one episode; returns the competence of its cell afterwards."""
        if self.open(cell):
            self.competence[cell] = min(self.competence[cell] + 1, TOP)
        return int(self.competence[cell])

    def open(self, cell: tuple[int, ...]) -> bool:
        if not any(cell):
            return True
        behind = (tuple(i + j for i, j in zip(cell, step, strict=True)) for step in self.before)
        return any(min(each) >= 0 and self.competence[each] >= OPEN for each in behind)

    def values(self, tasks: Floats) -> Floats:
        """Expected scores [n] at task vectors [n, D] (`HasTaskValues`), without training."""
        return np.array([self.competence[self.cell(task)] for task in tasks]) / TOP

    def tests(self, tasks: Floats) -> Floats:
        """Test scores [n] at task vectors [n, D] (`HasTestScores`), without training."""
        return self.values(tasks)

    def unlocked(self) -> float:
        """Share of unlocked cells."""
        return float((self.competence > OPEN).mean())


def turned(task: Floats, turns: int) -> Floats:
    """The task with its first two elements rotated by `turns` quarter turns about the centre."""
    task = task.copy()
    for _ in range(turns % 4):
        task[0], task[1] = task[1], 1 - task[0]
    return task


def main(words: list[str]) -> Path:
    config = read(words)
    student = Student(config)
    node = {**yaml.safe_load(file(config.teacher).read_text()), **config.settings}
    teacher = build(node, Teacher, spec=student.spec, seed=config.seed, student=student)
    return run(config, student, teacher)


def run(config: Config, student: Student, teacher: Teacher) -> Path:
    """Run `config.episodes` episodes, `config.rows` in parallel. Writes metrics.jsonl with the
    share of unlocked cells."""
    config.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    spent = 0.0
    every = max(config.episodes // config.points, 1)
    past: list[Floats] = []
    shares: list[float] = []
    with (config.out / "metrics.jsonl").open("w", buffering=1) as log:
        for played in range(0, config.episodes, config.rows):
            start = time.perf_counter()
            task, ticket = teacher.sample(min(config.rows, config.episodes - played))
            spent += time.perf_counter() - start
            outcome = student.play(task)
            start = time.perf_counter()
            teacher.update(ticket, outcome)
            spent += time.perf_counter() - start
            past += list(np.column_stack([task.numpy(), outcome.ret.numpy()]))
            if len(past) % every < config.rows or len(past) == config.episodes:
                shares.append(student.unlocked())
                line = {
                    "step": len(past),
                    "eval/unlocked": shares[-1],
                    "eval/mean_unlocked": float(np.mean(shares)),
                    "seconds": time.perf_counter() - began,
                    "teacher/microseconds": 1e6 * spent / len(past),
                    **{f"teacher/{k}": v for k, v in teacher.metrics().items()},
                }
                log.write(json.dumps(line) + "\n")
    played = np.array(past)
    np.savez_compressed(config.out / "tasks.npz", tasks=played.astype(np.float32))
    if config.picture:
        names, title = student.task.names, f"{config.teacher}, toy student"
        times = np.arange(float(len(played)))
        draw(config.out / "tasks.png", times, played[:, :-1], played[:, -1], names, title=title)
    print(
        f"{config.teacher}: {shares[-1]:.1%} of cells unlocked, "
        f"{1e6 * spent / config.episodes:.0f} us of teacher time per episode"
    )
    return config.out


def file(name: str) -> Path:
    folder = Path(configs.__path__[0]) / "teacher"
    path = folder / f"{name}.yaml"
    if not path.exists():
        known = [each.stem for each in folder.glob("*.yaml")]
        raise ConfigError(f'unknown teacher "{name}"{nearest(name, known)}')
    return path


def read(words: list[str]) -> Config:
    """Parse KEY=VALUE arguments."""
    given: dict[str, Any] = {"settings": {"signal": "return", "returns": [0.0, 1.0]}}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"toy: {word} should be KEY=VALUE")
        if key.startswith("teacher."):
            given["settings"][key.removeprefix("teacher.")] = yaml.safe_load(value)
        else:
            given[key] = Path(value) if key == "out" else yaml.safe_load(value)
    return parse(Config, given, "toy")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        raise SystemExit(f"toy: {error}") from error
