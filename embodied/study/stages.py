"""Stages of a study: commands that feed each other, with choices by a result, and loops.

    stages:
      - name: data
        run: embodied demos collect env=two_gap seed={seed} out={out}
      - name: policy
        run: policy=flow learner=imitate demos={data.out}
        choices: {small: "policy.hidden=[64]", large: "policy.hidden=[256]"}
        best: eval/success

`plan` turns them into the tasks of one seed, in order. It depends on the YAML only: `{NAME.out}` is
a known folder before anything has run, and that of a choice is a link to the best one. In a loop
it is that of the newest run of the stage: of this round, else of the one before, else of a stage of
the same name before the loop.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from embodied.core.atomic_write import write_json
from embodied.core.bounds import Count
from embodied.core.build import ConfigError, nearest

COMMANDS = ("embodied", "python")
NAME = re.compile(r"[A-Za-z]\w*")
GIVEN = ("work", "out", "seed", "round")


@dataclass(frozen=True)
class Stage:
    """A command with a `name`, or a loop: `repeat` and the `stages` of each round."""

    name: str = ""  # {NAME.out} in later lines is the folder of its result
    run: str = ""  # a command line, or only words of `embodied train`
    choices: Mapping[str, str | None] = field(default_factory=dict)  # by name, words added to `run`
    best: str = ""  # metric of which the last value chooses among `choices`
    direction: Literal["maximize", "minimize"] = "maximize"  # of `best`
    repeat: Count = 1  # rounds of a loop; {round} counts them from 0
    stages: tuple[Stage, ...] = ()  # of each round

    def __post_init__(self) -> None:
        if self.stages and (self.name or self.run or self.choices or self.best):
            raise ConfigError("a stage with `stages` is a loop and has only `repeat`")
        if self.stages:
            return
        if not NAME.fullmatch(self.name) or self.name in GIVEN or not self.run:
            raise ConfigError(f'stage "{self.name}" needs a name (letters) and run: COMMAND')
        if self.repeat > 1:
            raise ConfigError(f"stage {self.name}: repeat is for a loop (stages: [...])")
        if bool(self.choices) != bool(self.best):
            raise ConfigError(f"stage {self.name}: choices and best: METRIC belong together")
        for name in self.choices:
            if not re.fullmatch(r"\w+", name):
                raise ConfigError(f'stage {self.name}: "{name}" is no name of a choice (letters)')


@dataclass(frozen=True)
class Place:
    """What {NAME.out} reads."""

    out: Path

    def __format__(self, spec: str) -> str:
        raise ValueError("a stage is no word; its folder is {NAME.out}")


@dataclass(frozen=True)
class Task:
    """One stage of one seed, in one round: `lines` by the folder in which each runs. With several,
    `out` becomes a link to the folder whose metric `best` is the best."""

    name: str
    out: Path
    lines: Mapping[Path, str]
    best: str
    direction: str


def plan(stages: Sequence[Stage], work: Path, seed: int, base: str = "") -> list[Task]:
    """The tasks of `seed`, in order. ConfigError for a line that names a stage which is not before
    it, and for two stages of one name."""
    tasks = [*_tasks(stages, work, seed, base, {}, "")]
    for task in tasks:
        if sum(task.out == other.out for other in tasks) > 1:
            raise ConfigError(f'there are two stages "{task.name}"')
    return tasks


def places(stages: Sequence[Stage], work: Path, seed: int) -> dict[str, Place]:
    """By name, the folders of the last results: what lines after all stages may read."""
    return {task.name: Place(task.out) for task in plan(stages, work, seed)}


def _tasks(
    stages: Sequence[Stage],
    work: Path,
    seed: int,
    base: str,
    known: dict[str, Place],
    rounds: str,
) -> Iterator[Task]:
    """Each task is added to `known`; `rounds` ("-2" in round 2) ends the folders' names."""
    for stage in stages:
        if stage.stages:
            for number in range(stage.repeat):
                yield from _tasks(stage.stages, work, seed, base, known, f"{rounds}-{number}")
            continue
        out = work / f"stages-{seed}" / f"{stage.name}{rounds}"
        fields = {"work": work, "seed": seed, **known}
        if rounds:
            fields["round"] = int(rounds.rpartition("-")[2])
        lines: dict[Path, str] = {}
        for choice, more in (stage.choices or {"": ""}).items():
            own = out.with_name(f"{out.name}.{choice}") if choice else out
            text = whole(f"{stage.run} {more or ''}".strip(), base)
            lines[own] = filled(text, out=own, **fields)
        known[stage.name] = Place(out)
        yield Task(stage.name, out, lines, stage.best, stage.direction)


def whole(text: str, base: str) -> str:
    """The command line of `text`, which may be only words of `embodied train`, added to `base`."""
    if text.startswith(COMMANDS):
        return text
    return f"embodied train {base} {text} seed={{seed}} out={{out}} video=false"


def filled(text: str, **fields: object) -> str:
    """`text` with its fields. ConfigError for a field that is not known."""
    try:
        return text.format(**fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        stages = [name for name, value in fields.items() if isinstance(value, Place)]
        wanted = str(error.args[0]) if isinstance(error, KeyError) else ""
        if stages and wanted:
            raise ConfigError(
                f'`{text}`: there is no stage "{wanted}" before it{nearest(wanted, stages)}'
            ) from error
        more = ", and {NAME.out} of an earlier stage" if stages else ""
        raise ConfigError(
            f"`{text}`: only {{work}}, {{out}} and {{seed}} are filled in{more}; "
            "double other braces"
        ) from error


def choose(task: Task, scores: Mapping[Path, float]) -> Path:
    """Link `task.out` to the folder with the best score; OUT.choice.json keeps all scores.

    ConfigError if no score is a number, or if a study that goes on would choose another one than
    the one that its later stages used.
    """
    finite = {folder: score for folder, score in scores.items() if math.isfinite(score)}
    if not finite:
        raise ConfigError(f"stage {task.name}: no choice has a finite {task.best}")
    pick = max if task.direction == "maximize" else min
    chosen = pick(finite, key=lambda folder: finite[folder])
    file = Path(f"{task.out}.choice.json")
    if file.exists() and (before := json.loads(file.read_text())["chosen"]) != chosen.name:
        raise ConfigError(
            f"stage {task.name}: the best is now {chosen.name}, and later stages used {before}; "
            "choose another out= for the changed study"
        )
    shown = {folder.name: score for folder, score in scores.items()}
    write_json(file, {"chosen": chosen.name, "best": task.best, "scores": shown})
    partial = task.out.with_name(f".{task.out.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(chosen.name)
    os.replace(partial, task.out)
    return chosen
