"""Study: command lines, its variants, each run once per seed; what is finished is not repeated."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from embodied.core.atomic_write import locked, write_durably, write_json
from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, nearest, parse, shell_words
from embodied.core.children import module_command
from embodied.core.files import require_names
from embodied.core.saved_node import parse_yaml

# Stages of a study: commands that feed each other, with choices by a result, and loops.
#
#     stages:
#       - name: data
#         run: embodied demos collect env=two_gap seed={seed} out={out}
#       - name: policy
#         run: policy=flow learner=imitate demos={data.out}
#         choices: {small: "policy.hidden=[64]", large: "policy.hidden=[256]"}
#         best: eval/success
#
# `plan` turns them into the tasks of one seed, in order. It depends on the YAML only:
# `{NAME.out}` is a known folder before anything has run, and that of a choice is a link to the
# best one. In a loop it is that of the newest run of the stage: of this round, else of the one
# before, else of a stage of the same name before the loop.
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
    stages: Sequence[Stage], work: Path, seed: int, base: str, known: dict[str, Place], rounds: str
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


STOPPED = 130
ANYWHERE = Path("{work}")  # of lines that do not depend on where the study's folder is


@dataclass(frozen=True)
class Study:
    """One study.

    A variant is a command line with the fields {work}, {out} and {seed}, or only words of
    `embodied train`, to which `base`, the seed and the folder are added. A line of `before` may
    record another variant's episodes; all lines may read {NAME.out}, the folder of a stage. Every
    variant is compared with `baseline`.

    `benchmarks/rules.py` checks a study by its `kind`. improvement: of a base policy, or from
    recorded data; comparison: of two ways to learn; reproduction: of another implementation.
    """

    metric: str  # read from the last line of a variant's metrics.jsonl that has it
    seeds: tuple[CountOrZero, ...]  # each variant is run with each of them
    variants: dict[str, str]  # command lines or words, by name
    base: str = ""  # words of all variants
    baseline: str = ""  # the variant that the others are compared with (empty: the first)
    method: str = ""  # name of the method, on the study's page
    task: str = ""  # name of the task, on the study's page
    claim: str = ""  # what the study shows, on its page
    result: str = ""  # the variant of the method's row in docs/evidence.md
    prepare: tuple[str, ...] = ()  # lines that run once before everything
    before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # lines before each seed
    stages: tuple[Stage, ...] = ()  # lines that run once for each seed before all variants
    also: Mapping[str, str] = field(default_factory=dict)  # further rows: variant, method's name
    further_metrics: tuple[str, ...] = ()  # read and compared in the same way
    kind: Literal["", "improvement", "comparison", "reproduction"] = ""  # of study
    controls: Mapping[str, str] = field(default_factory=dict)  # variants that a fair study has
    exempt: Mapping[str, str] = field(default_factory=dict)  # why a rule is not for it, by rule
    not_yet_run: Mapping[str, str] = field(default_factory=dict)  # what the result lacks, and why
    advice: str = ""  # when to take this method and not another one, for pages to quote
    tuning_seeds: tuple[CountOrZero, ...] | None = None  # settings chosen on them (null: unknown)
    withdrawn: str = ""  # why the result no longer counts
    direction: Literal["maximize", "minimize"] = "maximize"  # of the metric

    def __post_init__(self) -> None:
        if not self.variants or not self.seeds:
            raise ConfigError("a study needs variants (NAME: words) and seeds: [0, 1, 2]")
        require_names(self.variants, "variants")  # each is a folder
        if not self.baseline:
            object.__setattr__(self, "baseline", next(iter(self.variants)))
        for name in filter(None, (self.baseline, self.result, *self.also, *self.before)):
            if name not in self.variants:
                raise ConfigError(f'there is no variant "{name}"{nearest(name, self.variants)}')
        for variant in self.variants if self.stages else ():
            self.line(variant, self.seeds[0], Path("WORK"))  # with its error
            self.lines_before(variant, self.seeds[0], Path("WORK"))

    def line(self, variant: str, seed: int, work: Path) -> str:
        text, out = whole(self.variants[variant], self.base), work / f"{variant}-{seed}"
        known = places(self.stages, work, seed)
        return " ".join(filled(text, work=work, out=out, seed=seed, **known).split())

    def lines_before(self, variant: str, seed: int, work: Path) -> list[str]:
        known = places(self.stages, work, seed)
        lines = self.before.get(variant, ())
        return [filled(text, work=work, seed=seed, **known) for text in lines]

    def tasks(self, seed: int, work: Path) -> list[Task]:
        return plan(self.stages, work, seed, self.base)

    @property
    def in_order(self) -> bool:
        """Whether a variant may continue from another one's folder."""
        lines = [
            *self.variants.values(),
            *(line for these in self.before.values() for line in these),
        ]
        return any("{work}/" in line for line in lines)


def read_study(text: str, name: str) -> Study:
    node = parse_yaml(text, f"study {name}")
    if not isinstance(node, dict):
        raise ConfigError(f"study {name} should hold metric, seeds and variants")
    if isinstance(variants := node.get("variants"), dict):  # one without words (`sac:`) has none
        node["variants"] = {str(k): "" if text is None else text for k, text in variants.items()}
    return parse(Study, node, f"study {name}")


def run(
    study: Study, work: Path, workers: int, done: Callable[[Path], object] = lambda out: None
) -> None:
    """Run what is missing, `workers` at a time; `done(out)` is called after each, one at a time.

    A failing run does not stop the others; ConfigError names the first one at the end.
    """
    work.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(study.prepare):
        command(filled(text, work=work), work / f"prepare-{number}", filled(text, work=ANYWHERE))
    one_at_a_time = threading.Lock()

    def finish(out: Path) -> None:
        with one_at_a_time:
            done(out)

    pool = ThreadPoolExecutor(workers)
    try:
        failures = pool.map(lambda seed: _problem(partial(_stages, study, work, seed)), study.seeds)
        staged = dict(zip(study.seeds, failures, strict=True))
        jobs: list[list[tuple[str, int]]] = []  # each is run in order
        for seed in (seed for seed in study.seeds if staged[seed] is None):
            pairs = [(variant, seed) for variant in study.variants]
            jobs += [pairs] if study.in_order else [[pair] for pair in pairs]
        ended = pool.map(lambda names: _problem(partial(_chain, study, work, names, finish)), jobs)
        problems = [problem for problem in (*staged.values(), *ended) if problem is not None]
    finally:  # after Ctrl-C nothing more is started
        pool.shutdown(cancel_futures=True)
    if problems:
        raise problems[0]


def _problem(work: Callable[[], None]) -> ConfigError | None:
    """The problem of work that failed, which is printed."""
    try:
        work()
    except ConfigError as problem:
        print(f"embodied: {problem}", file=sys.stderr, flush=True)
        return problem
    return None


def _stages(study: Study, work: Path, seed: int) -> None:
    """Run the stages of a seed that have not finished, in order."""
    for task, same in zip(study.tasks(seed, work), study.tasks(seed, ANYWHERE), strict=True):
        task.out.parent.mkdir(parents=True, exist_ok=True)
        for (out, line), asked in zip(task.lines.items(), same.lines.values(), strict=True):
            command(line, out, asked)
        if task.best:
            chosen = choose(task, {out: last_value(out, task.best) for out in task.lines})
            print(f"stage {task.name}, seed {seed}: {chosen.name} is the best", flush=True)


def _chain(
    study: Study, work: Path, pairs: Sequence[tuple[str, int]], done: Callable[[Path], object]
) -> None:
    for variant, seed in pairs:
        out = work / f"{variant}-{seed}"
        asked = study.lines_before(variant, seed, ANYWHERE)
        for number, line in enumerate(study.lines_before(variant, seed, work)):
            command(line, Path(f"{out}-before-{number}"), asked[number])
        command(study.line(variant, seed, work), out, study.line(variant, seed, ANYWHERE))
        done(out)


def command(line: str, out: Path, asked: str) -> None:
    """Run a command line once; OUT.log keeps its output, OUT.done its seconds and commit, OUT.line
    what was `asked` for: the line, wherever the study's folder is.

    An interrupted training is resumed exactly. ConfigError where it, or what ended, is of another.
    """
    done, said = Path(f"{out}.done"), Path(f"{out}.line")
    words = shell_words(line, out.name)
    resumed = words[:2] == ["embodied", "train"] and any(out.glob("checkpoints/[0-9]*/loop.pt"))
    if (done.exists() or resumed) and said.exists() and said.read_text() != asked:
        raise ConfigError(
            f"{out} was made by `{said.read_text()}`, which the study has changed: choose another "
            f"out=, or remove {out}*"
        )
    if done.exists():
        return
    if resumed:
        words = [*resume_words(words), f"resume={out}"]
    else:
        with locked(out):  # a training of a study that was killed may still write there
            shutil.rmtree(out, ignore_errors=True)
        said.write_text(asked)
    print(shlex.join(words) if resumed else line, flush=True)
    from embodied.core.checkpoint import git_revision  # imports torch: not where FILE is wrong

    earlier = sum(value for _, value in values_of(out, "seconds")[-1:]) if resumed else 0.0
    start, commit = time.perf_counter() - earlier, git_revision() or "unknown"
    with Path(f"{out}.log").open("a" if resumed else "w") as log:
        code = subprocess.run(
            program(words), stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code == STOPPED:
        raise KeyboardInterrupt
    if code != 0:
        raise ConfigError(f"study: `{line}` failed with {code}; see {out}.log")
    ended = f"{time.perf_counter() - start:.3f} {commit}\n".encode()
    write_durably(done, lambda file: file.write(ended))  # the page may be written meanwhile


def program(words: Sequence[str]) -> list[str]:
    """`embodied` and `python` are those of this Python."""
    if words[0] == "embodied":
        return module_command("embodied.cli", *words[1:])
    return [sys.executable if words[0] == "python" else words[0], *words[1:]]


def resume_words(words: Sequence[str]) -> list[str]:
    """Of a training's words those that a resumed one needs too."""
    kept = [word for word in words if word.startswith("allow=")]
    for at, word in enumerate(words[:-1]):
        if word == "--config-dir":
            kept += [word, words[at + 1]]
    return [*words[:2], *kept]


def is_done(work: Path, variant: str, seed: int) -> bool:
    return (work / f"{variant}-{seed}.done").exists()


def last_value(folder: Path, metric: str) -> float:
    values = values_of(folder, metric)
    if not values:
        raise ConfigError(f"study: {folder}/metrics.jsonl has no {metric}")
    return values[-1][1]


def values_of(folder: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every complete line of a run's metrics that has `metric`."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return [(int(row.get("step", 0)), float(row[metric])) for row in rows if metric in row]


def seconds_of(out: Path) -> float:
    return float(Path(f"{out}.done").read_text().split()[0])


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
