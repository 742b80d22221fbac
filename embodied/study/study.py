"""Study: command lines, its variants, each run once per seed; what is finished is not repeated."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from embodied.core.bounds import CountOrZero
from embodied.core.build import ConfigError, nearest, parse
from embodied.core.children import module_command
from embodied.core.yaml_text import parse_yaml
from embodied.study.stages import Stage, Task, choose, filled, places, plan, whole

STOPPED = 130


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
    exempt: Mapping[str, str] = field(default_factory=dict)  # why a control is left out
    tuning_seeds: tuple[CountOrZero, ...] | None = None  # settings chosen on them (null: unknown)
    withdrawn: str = ""  # why the result no longer counts
    direction: Literal["maximize", "minimize"] = "maximize"  # of the metric

    def __post_init__(self) -> None:
        if not self.variants or not self.seeds:
            raise ConfigError("a study needs variants (NAME: words) and seeds: [0, 1, 2]")
        if not self.baseline:
            object.__setattr__(self, "baseline", next(iter(self.variants)))
        for name in filter(None, (self.baseline, self.result, *self.also, *self.before)):
            if name not in self.variants:
                raise ConfigError(f'there is no variant "{name}"{nearest(name, self.variants)}')
        for variant in self.variants if self.stages else ():
            self.line(variant, self.seeds[0], Path("WORK"))  # with its error
            self.lines_before(variant, self.seeds[0], Path("WORK"))

    def line(self, variant: str, seed: int, work: Path) -> str:
        """The command line of a variant."""
        text, out = whole(self.variants[variant], self.base), work / f"{variant}-{seed}"
        known = places(self.stages, work, seed)
        return " ".join(filled(text, work=work, out=out, seed=seed, **known).split())

    def lines_before(self, variant: str, seed: int, work: Path) -> list[str]:
        """The command lines that run before a variant."""
        known = places(self.stages, work, seed)
        lines = self.before.get(variant, ())
        return [filled(text, work=work, seed=seed, **known) for text in lines]

    def tasks(self, seed: int, work: Path) -> list[Task]:
        """The stages of a seed as tasks, in order."""
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
    """Parse a study; ConfigError for a mistake in it."""
    node = parse_yaml(text, f"study {name}")
    if not isinstance(node, dict):
        raise ConfigError(f"study {name} should hold metric, seeds and variants")
    return parse(Study, {**node, "variants": _texts(node.get("variants"))}, f"study {name}")


def _texts(variants: Any) -> Any:
    """A variant without words (`sac:`) is one with none."""
    if not isinstance(variants, dict):
        return variants
    return {str(name): "" if text is None else text for name, text in variants.items()}


def run(
    study: Study, work: Path, workers: int, done: Callable[[Path], object] = lambda out: None
) -> None:
    """Run what is missing, `workers` at a time; `done(out)` is called after each, one at a time.

    A failing run does not stop the others; ConfigError names the first one at the end.
    """
    work.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(study.prepare):
        command(filled(text, work=work), work / f"prepare-{number}")
    one_at_a_time = threading.Lock()

    def finish(out: Path) -> None:
        with one_at_a_time:
            done(out)

    pool = ThreadPoolExecutor(workers)
    try:
        failures = pool.map(lambda seed: _stages(study, work, seed), study.seeds)
        staged = dict(zip(study.seeds, failures, strict=True))
        jobs = [pairs for pairs in _jobs(study) if staged[pairs[0][1]] is None]
        ended = pool.map(lambda names: _chain(study, work, names, finish), jobs)
        problems = [problem for problem in (*staged.values(), *ended) if problem is not None]
    finally:  # after Ctrl-C nothing more is started
        pool.shutdown(cancel_futures=True)
    if problems:
        raise problems[0]


def _jobs(study: Study) -> Iterator[list[tuple[str, int]]]:
    """Lists of (variant, seed) that are run in order; the lists are run in parallel."""
    for seed in study.seeds:
        pairs = [(variant, seed) for variant in study.variants]
        yield from [pairs] if study.in_order else [[pair] for pair in pairs]


def _stages(study: Study, work: Path, seed: int) -> ConfigError | None:
    """Run the stages of a seed that have not finished, in order; returns the problem of one that
    failed, after which none is run."""
    try:
        for task in study.tasks(seed, work):
            task.out.parent.mkdir(parents=True, exist_ok=True)
            for out, line in task.lines.items():
                command(line, out)
            if task.best:
                chosen = choose(task, {out: last_value(out, task.best) for out in task.lines})
                print(f"stage {task.name}, seed {seed}: {chosen.name} is the best", flush=True)
    except ConfigError as problem:
        print(f"embodied: {problem}", file=sys.stderr, flush=True)
        return problem
    return None


def _chain(
    study: Study, work: Path, pairs: Sequence[tuple[str, int]], done: Callable[[Path], object]
) -> ConfigError | None:
    for variant, seed in pairs:
        out = work / f"{variant}-{seed}"
        try:
            for number, line in enumerate(study.lines_before(variant, seed, work)):
                command(line, Path(f"{out}-before-{number}"))
            command(study.line(variant, seed, work), out)
        except ConfigError as problem:
            print(f"embodied: {problem}", file=sys.stderr, flush=True)
            return problem
        done(out)
    return None


def command(line: str, out: Path) -> None:
    """Run a command line once; OUT.log keeps its output, OUT.done its seconds and commit.

    A training that was interrupted is resumed exactly from its last checkpoint.
    """
    done = Path(f"{out}.done")
    if done.exists():
        return
    words = shlex.split(line)
    resumed = words[:2] == ["embodied", "train"] and any(out.glob("checkpoints/[0-9]*/loop.pt"))
    if resumed:
        words = [*resume_words(words), f"resume={out}"]
    else:
        shutil.rmtree(out, ignore_errors=True)
    print(shlex.join(words) if resumed else line, flush=True)
    from embodied.core.checkpoint import git_revision  # imports torch: not where FILE is wrong

    start, commit = time.perf_counter(), git_revision() or "unknown"
    with Path(f"{out}.log").open("a" if resumed else "w") as log:
        code = subprocess.run(
            program(words), stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code == STOPPED:
        raise KeyboardInterrupt
    if code != 0:
        raise ConfigError(f"study: `{line}` failed with {code}; see {out}.log")
    done.write_text(f"{time.perf_counter() - start:.3f} {commit}\n")


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
    """The last value of `metric` in a run's metrics."""
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
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
