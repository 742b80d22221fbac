"""Trials: candidates are trained in parallel, each by `embodied train` in its own process.

They are compared by the environment's own measure (eval/success, or eval/return without a success
signal), read from the run's evaluations, which a program cannot influence. A process that exceeds
its time is killed with its children.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied.core.bounds import Count, Positive, PositiveFraction
from embodied.core.children import module_command
from embodied.rewards.handcrafted.program import statistics
from embodied.training.logger import read_metrics

POINTS = 10  # of a component's curve


@dataclass(frozen=True)
class Budget:
    """Budget of a trial. With `halving`, the best third of a round continues after the first
    part."""

    steps: Count = 48_000  # environment steps
    eval_every: Count = 8_000  # steps between evaluations
    minutes: Positive = 30.0  # time limit, minutes
    workers: Count = 1  # trainings in parallel
    halving: bool = True  # all candidates of a round train for a fraction `first` of the steps
    first: PositiveFraction = 0.5  # that fraction


@dataclass(frozen=True)
class Job:
    """One training; `name` is its folder."""

    name: str
    program: Path
    seed: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """`scores` [[step, value], ...]; `terms`: the components' means during training; `problem`: why
    it ended early."""

    scores: list[tuple[int, float]] = field(default_factory=list)
    terms: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


class Trials:
    """Runs jobs in `folder`; `words` are the arguments of `embodied train` that all share,
    `reward` settings of the reward besides."""

    def __init__(
        self, folder: Path, words: Sequence[str], budget: Budget, reward: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.words = list(words)
        self.budget = budget
        self.reward = reward
        self.running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Yields outcomes as they finish; stops all jobs if the caller is interrupted."""
        with ThreadPoolExecutor(max(1, self.budget.workers)) as pool:
            futures = {pool.submit(self._one, job): job for job in jobs}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                self.stopped = True
                for future in futures:
                    future.cancel()
                for process in list(self.running):
                    _kill(process)
                raise

    def command(self, job: Job, out: Path) -> list[str]:
        """The command line: a new training, or more steps of a saved one."""
        start = module_command("embodied.cli", "train")
        if any(out.glob("checkpoints/[0-9]*")):
            return [*start, f"resume={out}", f"steps={job.steps}"]
        return [
            *start,
            *self.words,
            "reward=program",
            f"reward.file={job.program}",
            *self.reward,
            f"reward.every={max(1, self.budget.steps // (2 * POINTS))}",
            f"seed={job.seed}",
            f"steps={job.steps}",
            f"eval_every={self.budget.eval_every}",
            f"out={out}",
            "save_every=0",
            "video=false",
        ]

    def _one(self, job: Job) -> Outcome:
        out = self.folder / job.name
        if self.stopped:
            return Outcome(problem="stopped")
        saved = any(out.glob("checkpoints/[0-9]*"))
        if not saved:
            shutil.rmtree(out, ignore_errors=True)  # left by a killed training
        out.mkdir(parents=True, exist_ok=True)
        problem = self._process(self.command(job, out), out / "trial.log")
        return self.read(out, problem)

    def _process(self, command: list[str], log: Path) -> str:
        """ "" or the error: the last line of the log."""
        until = time.monotonic() + 60 * self.budget.minutes
        with log.open("ab") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self.running.add(process)
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"timed out after {self.budget.minutes:g} minutes"
            finally:
                _kill(process)
                self.running.discard(process)
        if code == 0:
            return ""
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "the process ended without output"
        return last.removeprefix("embodied: ")[:500]

    @staticmethod
    def read(out: Path, problem: str = "") -> Outcome:
        """Read the results of a run's folder."""
        rows = read_metrics(out)
        key = "eval/success" if any("eval/success" in row for row in rows) else "eval/return"
        scores = {int(row["step"]): float(row[key]) for row in rows if key in row}
        return Outcome(sorted(scores.items()), thinned(statistics(out / "reward")), problem)


def thinned(lines: list[dict[str, Any]], points: int = POINTS) -> list[dict[str, Any]]:
    """`points` evenly spaced lines, including the last."""
    if len(lines) <= points:
        return lines
    return [lines[round((i + 1) * len(lines) / points) - 1] for i in range(points)]


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
