"""A teacher's compute time per episode, and its share of a run: FR3 reach with SAC."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.command import main
from benchmarks.envs import fr3
from benchmarks.learners import filled, learner_for, updating
from benchmarks.measure import Comparison, alone, write_json
from embodied import configs
from embodied.buffers.replay import ReplayBuffer
from embodied.checks.teacher import ready
from embodied.core.build import ConfigError, build, resolve
from embodied.core.spec import Leaf, Spec
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.maze.env import Config as MazeConfig
from embodied.envs.maze.env import Maze
from embodied.teachers.teacher import Curriculum, Outcome, Teacher

TASK = Leaf((3,), low=0.0, high=1.0, names=("goal_x", "goal_y", "goal_z"))
SPEC = Spec({"state": Leaf((20,))}, Leaf((4,), low=-1.0, high=1.0), 0.05, TASK)
HELPED = replace(TASK, names=("goal_x", "goal_y", "help"))
ROWS = 16  # parallel episodes
STEPS = 50  # FR3 reach: its horizon
RATIO = 0.5  # updates per step
TARGET = 0.05  # target: share of a run's time


def run(out: Path | str = "bench", repeats: int = 3, episodes: int = 1000) -> list[Comparison]:
    """Measure every teacher of configs/teacher that selects tasks, on one thread; print the table,
    write `out/teachers.json`. About two minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = episode(repeats)
        with tempfile.TemporaryDirectory() as folder:
            rows = [measure(path, Path(folder), repeats, episodes, seconds) for path in files()]
    finally:
        torch.set_num_threads(threads)
    found = [row for row in rows if row is not None]
    show(found, seconds)
    write_json(Path(out), "teachers", found)
    return found


def files() -> list[Path]:
    """The YAML of every teacher."""
    return sorted((Path(configs.__path__[0]) / "teacher").glob("*.yaml"))


def episode(repeats: int) -> float:
    """Seconds of one FR3 reach episode in a run: its steps and SAC's updates."""
    steps = fr3("reach", ROWS, 25, 1, repeats).ours_rate
    replay = filled(ReplayBuffer(10_000, torch.device("cpu")))
    updates = alone(updating(learner_for("sac", torch.device("cpu")), replay), repeats).ours_rate
    return STEPS / steps + STEPS * RATIO / updates


def measure(
    path: Path, folder: Path, repeats: int, episodes: int, seconds: float
) -> Comparison | None:
    """Episodes per second of one teacher alone; None for one that selects no tasks."""
    node: dict[str, Any] = yaml.safe_load(path.read_text())
    try:
        built = build(ready(node, SPEC, folder), Curriculum, **given(node), seed=0)
        teacher = cast(Teacher, built)  # or it samples as one
    except ConfigError as error:
        Console().print(f"{path.stem}: not measured: {error}", markup=False)
        return None
    row = alone(teaching(teacher, episodes), repeats, path.stem, "episodes")
    each = 1 / row.ours_rate
    notes = {"microseconds": 1e6 * each, "share": each / (each + seconds), "target": TARGET}
    return replace(row, notes=notes)


def teaching(teacher: Teacher, episodes: int) -> Callable[[], int]:
    """Blocks of `episodes` episodes, ROWS in parallel, ending one at a time in random order; the
    student succeeds in a growing part of the task space, and from every saved state."""
    random, played = np.random.default_rng(0), 0
    rival = getattr(teacher, "rival", None)  # the antagonist plays as many episodes
    task, ticket = teacher.sample(ROWS)

    def block() -> int:
        nonlocal played
        for _ in range(episodes):
            row = int(random.integers(ROWS))
            reach = min(0.3 + played / 2000, 1.2)
            far = float(task[row].norm()) if task.is_floating_point() else 0.0
            won = float(random.random() < np.exp(-4 * max(far - reach, 0)))
            teacher.update(ticket[row : row + 1], finished(won))
            task[row], ticket[row] = (value[0] for value in teacher.sample(1))
            if rival is not None:
                rival.update(rival.sample(1)[1], finished(1 - won))
            played += 1
        return episodes

    return block


def finished(score: float) -> Outcome:
    """An episode with return `score`, successful if that is 1; the student's values are half."""
    value = torch.tensor([score])
    return Outcome(value, value, torch.tensor([float(STEPS)]), value / 2, value / 2, value / 2)


def given(node: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a teacher is built with, by its requirements on the environment (default:
    a box of tasks). ConfigError for a two-agent teacher."""
    needs = resolve(node["_target_"], Curriculum).needs
    if needs == "counts":
        raise ConfigError("it trains a second agent and selects no tasks")
    if needs == "levels":
        world = Maze(MazeConfig())
        return {"spec": world.spec, "levels": world.levels}
    if needs == "states":
        env = Fr3(Fr3Config(task="reach", num_envs=2, threads=1))
        return {"spec": env.spec, "env": env}
    return {"spec": replace(SPEC, task=HELPED) if needs == "help" else SPEC}


def show(rows: list[Comparison], seconds: float, console: Console | None = None) -> None:
    """Print one line per teacher."""
    shown = Table(title=f"a teacher's own time; an FR3 reach episode with SAC is {seconds:.2f} s")
    shown.add_column("teacher")
    for heading in ("us per episode", "share of the run", "target"):
        shown.add_column(heading, justify="right")
    for row in rows:
        micro, share = row.notes["microseconds"], row.notes["share"]
        shown.add_row(row.name, f"{micro:,.0f}", f"{share:.2%}", f"{TARGET:.0%}")
    (console or Console()).print(shown)


if __name__ == "__main__":
    main(run)
