"""Runs a reward design from its configuration: experience, designer, search and report.

Evolutionary search over reward programs, shared by all designers.

    for round in 1..I: K programs -> checks -> training -> fitness (environment) -> best

As Eureka (Ma et al., 2023), with successive halving. The maximum of many noisy numbers is biased
upwards: the best program is retrained with fresh seeds, and only that is reported.

Trials: candidates are trained in parallel, each by `embodied train` in its own process.

They are compared by the environment's own measure (eval/success, or eval/return without a success
signal), read from the run's evaluations, which a program cannot influence. A process that exceeds
its time is killed with its children.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from embodied.core.bounds import Count, CountOrZero, Positive, PositiveFraction
from embodied.core.build import ConfigError, Node, build
from embodied.core.children import module_command
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.llm.client import open_chat
from embodied.reports.page import chart
from embodied.reward_design.designer import (
    FILE,
    Board,
    Candidate,
    Designer,
    Experience,
    Journal,
    Proposal,
    gather,
)
from embodied.reward_design.designers.grammar import drawn_at_random
from embodied.reward_design.prompts import about, curves, line
from embodied.rewards.handcrafted.program import statistics, variables
from embodied.sandbox.gate import Sandbox
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

    @property
    def eval_interval(self) -> int:
        """Steps between evaluations; a training ends with one, and no training is longer."""
        return min(self.eval_every, self.steps)


@dataclass(frozen=True)
class Job:
    """One training; `name` is its folder, `words` are its settings."""

    name: str
    words: tuple[str, ...]
    seed: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """`scores` [[step, value], ...]; `terms`: the components' means during training; `problem`: why
    it ended early."""

    scores: list[tuple[int, float]] = field(default_factory=list)
    terms: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


@dataclass
class Trials:
    """Runs jobs in `folder`; `words` are the arguments of `embodied train` that all share."""

    folder: Path
    words: Sequence[str]
    budget: Budget
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    stopped: bool = False

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
            *job.words,
            f"seed={job.seed}",
            f"steps={job.steps}",
            f"eval_every={self.budget.eval_interval}",
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
        problem = self.process(self.command(job, out), out / "trial.log")
        return self.read(out, problem)

    def process(self, command: list[str], log: Path) -> str:
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


FRESH = 1_000  # offset of the final trainings' seeds
Tell = Callable[[str], None]


@dataclass
class Search:
    """`rounds` of `samples` programs, then `finals` trainings of the best. `silent`: the budget of
    the model is spent."""

    designer: Designer
    board: Board
    trials: Trials
    rounds: int
    samples: int
    finals: int
    tell: Tell
    require_lock: bool = True
    silent: bool = False

    @property
    def ledger(self) -> Journal:
        return self.board.ledger

    def run(self) -> Candidate | None:
        """Run all rounds; returns the best program, None if none could be trained."""
        for number in range(self.rounds):
            if number not in self.ledger.rounds:
                self.tell(f"round {number + 1} of {self.rounds}")
                if not self.ledger.of_round(number):
                    self._propose(number)
                self._train(number)
                self._conclude(number)
            if self.ledger.said.get(number) == STOP:
                break
        best = self.ledger.best
        if best is not None:
            self._final(best)
        return best

    def _propose(self, number: int) -> None:
        """All proposals of a round are stored before any is trained, so that their numbers do not
        depend on failures."""
        proposals = self.designer.propose(self.board, number, self.samples)
        first = 1 + max(self.ledger.candidates, default=-1)
        self.silent = bool(proposals)
        seen = {c.digest: c for c in self.ledger.candidates.values() if c.source is not None}
        for place, proposal in enumerate(proposals):
            self.silent &= bool(proposal.origin.get("spent"))
            candidate = self._candidate(first + place, number, proposal, seen)
            seen.setdefault(candidate.digest, candidate)
            folder = self.ledger.folder_of(candidate)
            folder.mkdir(parents=True, exist_ok=True)
            if candidate.source is not None:
                (folder / "reward.py").write_text(candidate.source)
            self.ledger.put(candidate)
            for reason in candidate.returned:
                self.tell(f"  {candidate.id:3d}  returned  {reason[:100]}")
            if candidate.problem:
                self.tell(f"  {candidate.id:3d}  rejected  {candidate.problem[:100]}")

    def _candidate(
        self, id: int, number: int, proposal: Proposal, seen: dict[str, Candidate]
    ) -> Candidate:
        source = proposal.source
        problem = proposal.problem
        report = {}
        digest = hashlib.sha256((source or "").encode()).hexdigest()
        if source is not None and not problem:
            if digest in seen:
                problem = f"duplicate: the same program as {seen[digest].id}"
            else:
                verdict = self.board.check(source)
                report = verdict.report
                problem = f"{verdict.layer}: {verdict.problem}" if verdict.problem else ""
        return Candidate(id, number, source, digest, proposal.origin, problem, report)

    def _train(self, number: int) -> None:
        budget = self.trials.budget
        ready = [c for c in self.ledger.of_round(number) if not c.problem]
        short = max(budget.eval_interval, round(budget.first * budget.steps))
        if budget.halving and len(ready) > 1 and short < budget.steps:
            self._run([c for c in ready if not c.scores], short)
            ready = [self.ledger.candidates[c.id] for c in ready]
            keep = -(-len(ready) // 3)
            best = sorted((c for c in ready if c.scores), key=lambda c: c.order, reverse=True)
            ready = best[:keep]
        self._run([c for c in ready if not c.trained], budget.steps, last=True)

    def _run(self, candidates: Sequence[Candidate], steps: int, last: bool = False) -> None:
        by_name = {f"{c.id:03d}": c for c in candidates}
        jobs = [
            self._job(f"candidates/{n}/run", c, self.board.seed, steps) for n, c in by_name.items()
        ]
        for job, outcome in self.trials.run(jobs):
            candidate = by_name[job.name.split("/")[1]]
            candidate = self.ledger.update(
                candidate.id,
                scores=outcome.scores,
                terms=outcome.terms,
                problem=outcome.problem,
                trained=last and not outcome.problem,
            )
            self.tell(row(candidate, outcome))

    def _job(self, name: str, candidate: Candidate, seed: int, steps: int) -> Job:
        words = (
            "reward=program",
            f"reward.file={self.ledger.folder_of(candidate) / 'reward.py'}",
            f"reward.require_lock={str(self.require_lock).lower()}",
            f"reward.every={max(1, self.trials.budget.steps // (2 * POINTS))}",
        )
        return Job(name, words, seed, steps)

    def _conclude(self, number: int) -> None:
        best = self.ledger.best
        if best is not None and best.source is not None:
            (self.ledger.folder / "best.py").write_text(best.source)
        else:
            self.tell("  no program could be trained so far")
        if self.silent:
            self.tell("  the budget of the model is spent: the search ends")
        said = None if self.silent else self.designer.say(self.board, number)
        self.ledger.close_round(number, STOP if said is None else said)

    def _final(self, best: Candidate) -> None:
        """Retrain the best program with fresh seeds."""
        seeds = [self.board.seed + FRESH + i for i in range(self.finals)]
        steps = self.trials.budget.steps
        jobs = [
            self._job(f"final/{seed}", best, seed, steps)
            for seed in seeds
            if seed not in self.ledger.finals
        ]
        if jobs:
            self.tell(f"the best, {best.id}, with {len(seeds)} fresh seeds")
        for job, outcome in self.trials.run(jobs):
            if outcome.scores:
                self.ledger.final(job.seed, outcome.scores[-1][1])
                self.tell(f"  seed {job.seed}: {outcome.scores[-1][1]:.3g}")
            else:
                self.tell(f"  seed {job.seed}: {outcome.problem}")


STOP = "the search was ended"


def row(candidate: Candidate, outcome: Outcome) -> str:
    """One candidate in one line."""
    auc = candidate.report.get("auc")
    gate = "auc  -  " if auc is None else f"auc {auc:.2f}"
    if not outcome.scores:
        return f"  {candidate.id:3d}  failed    {gate}  {outcome.problem[:90]}"
    step, value = outcome.scores[-1]
    best = candidate.order[0]
    tail = f"  ({outcome.problem[:60]})" if outcome.problem else ""
    return f"  {candidate.id:3d}  {best:8.3g}  {gate}  now {value:.3g} at {step:,} steps{tail}"


STYLE = (
    "<style>text{font:11px sans-serif;fill:#666}.grid{stroke:#ddd;fill:none}"
    ".line{stroke:#2a6fdb;fill:none;stroke-width:2}.dot{fill:#2a6fdb}.y{text-anchor:end}"
    ".x{text-anchor:middle}</style>"
)


def write(ledger: Journal, settings: dict[str, Any]) -> Path:
    """Write `report.md` and `fitness.svg` to the journal's folder."""
    folder = ledger.folder
    best = ledger.best
    lines = [f"# Reward design: {settings['sentence']}", ""]
    lines += [f"- environment: {settings['world']}", f"- designer: {settings['designer']}"]
    lines += [f"- model: {settings['model']}", f"- sandbox: {settings['sandbox']}"]
    lines += [f"- measure: {settings['measure']}, measured by the environment, not by a program"]
    lines += [f"- cost: {cost(ledger)}", ""]
    lines += _best(best, ledger) if best is not None else ["No valid program.", ""]
    picture = plot(ledger)
    if picture:
        (folder / "fitness.svg").write_text(picture)
        lines += ["![best score after each round](fitness.svg)", ""]
    lines += ["| id | round | best score | AUC | problem | program |", "|---|---|---|---|---|---|"]
    lines += [row_of(c) for c in ledger.candidates.values()]
    file = folder / "report.md"
    file.write_text("\n".join([*lines, ""]))
    return file


def cost(ledger: Journal) -> str:
    """Numbers of programs, trainings, environment steps and tokens."""
    all_ = list(ledger.candidates.values())
    trained = [c for c in all_ if c.scores]
    steps = sum(c.scores[-1][0] for c in trained)
    tokens = sum(int(c.origin.get("tokens", 0)) for c in all_)
    words = f", {tokens:,} tokens" if tokens else ""
    return f"{len(all_)} programs, {len(trained)} trained, {steps:,} steps{words}"


def plot(ledger: Journal) -> str:
    """The best score so far by round, as SVG."""
    points: list[tuple[float, float]] = []
    for number in sorted({c.round for c in ledger.candidates.values()}):
        values = [c.fitness for c in ledger.of_round(number) if c.fitness is not None]
        best = max([*values, *(y for _, y in points)], default=None)
        if best is not None:
            points.append((float(number + 1), float(best)))
    title = "best score after each round"
    drawn = chart({title: points}, title, legend=False)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f">{STYLE}", 1
    )


def _best(best: Candidate, ledger: Journal) -> list[str]:
    scores = list(ledger.finals.values())
    lines = [f"## The best program ({best.id}, round {best.round + 1})", ""]
    lines += [f"Selected for {best.fitness:.3g}, the maximum of many: biased upwards."]
    if scores:
        each = ", ".join(f"{s:.3g}" for s in scores)
        lines += [f"Retrained with fresh seeds: {sum(scores) / len(scores):.3g} ({each})."]
    lines += ["", "```python", (best.source or "").rstrip(), "```", ""]
    lines += [f"- {line(name, values)}" for name, values in curves(best).items()]
    return [*lines, ""]


def row_of(c: Candidate) -> str:
    """The table row of a candidate, with the last reason for which the model had to repair it."""
    fitness = "" if c.fitness is None else f"{c.fitness:.3g}"
    auc = c.report.get("auc")
    repaired = "".join(f"repaired: {reason}" for reason in c.returned[-1:])
    problem = html.escape((c.problem or repaired)[:120]).replace("|", "/")
    link = f"[{c.digest[:8]}](candidates/{c.id:03d}/reward.py)" if c.source else ""
    cells = [str(c.id), str(c.round + 1), fitness, "" if auc is None else f"{auc:.2f}", problem]
    return "| " + " | ".join([*cells, link]) + " |"


ROWS = 16  # parallel envs for the experience


@dataclass(frozen=True)
class DesignConfig:
    """Settings of a reward design. Programs are checked on random steps and on a demonstrator's."""

    env: Node  # environment
    designer: Node  # proposes programs
    sentence: str  # the task in words
    out: str  # folder of the design; a folder with a journal is resumed
    chat: Node | None = None  # language model; null: the designer needs none
    demonstrator: Node | None = None  # policy that acts for `shown` steps; null: none
    learn: tuple[str, ...] = ()  # words of `embodied train` with which candidates are trained
    rounds: Count = 3  # rounds of programs
    samples: Count = 6  # programs per round
    finals: CountOrZero = 3  # trainings of the best program with fresh seeds
    seed: CountOrZero = 0  # seed of the search
    tried: Count = 2000  # random steps on which programs are checked
    shown: CountOrZero = 2000  # steps of the demonstrator on which programs are checked
    controls: CountOrZero = 0  # random programs of the grammar to write, for comparison
    require_lock: bool = True  # false: programs run where their process cannot be locked, too
    budget: Budget = field(default_factory=Budget)  # of each training


def design(config: DesignConfig, words: Sequence[str], tell: Tell) -> Path:
    """Search, and write the report; returns the folder. `words` select the environment for
    `embodied train`. A folder with a journal is resumed. KeyboardInterrupt stops all trainings."""
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    chat = None if config.chat is None else open_chat(config.chat, folder)
    designer = build(config.designer, Designer, **({"chat": chat} if chat else {}))
    env = build(config.env | {"num_envs": ROWS}, VecEnv)
    try:
        experience = _experience(config, env, folder)
        spec, world = env.spec, about(env)
    finally:
        env.close()
    found = variables(spec)
    for number in range(config.controls):
        (folder / f"control-{number}.py").write_text(drawn_at_random(found, number))
    ledger = Journal(folder)
    sandbox = Sandbox(require_lock=config.require_lock)
    tell(f"sandbox: {sandbox.status}")
    tell(_summary(experience))
    board = Board(
        config.sentence,
        world,
        spec,
        found,
        ledger,
        experience,
        cache(lambda source: experience.check(sandbox, found, source)),
        config.seed,
    )
    trials = Trials(folder, [*words, *config.learn], config.budget)
    best = Search(
        designer,
        board,
        trials,
        config.rounds,
        config.samples,
        config.finals,
        tell,
        config.require_lock,
    ).run()
    facts = {
        "sentence": config.sentence,
        "world": " ".join(words),
        "designer": str(config.designer["_target_"]).rpartition(".")[2],
        "model": "none" if chat is None else f"{chat.name} (its quality is not assessed here)",
        "sandbox": sandbox.status,
        "measure": "return of the environment's reward"
        if experience.success is None
        else "success",
    }
    write(ledger, facts)
    if best is None:
        raise ConfigError(f"no valid program; see {folder / 'report.md'}")
    return folder


def _experience(config: DesignConfig, env: VecEnv, folder: Path) -> Experience:
    if (folder / FILE).exists() and (folder / "experience.safetensors").exists():
        return Experience.load(folder)
    demonstrator: Policy | None = None
    if config.demonstrator is not None:
        demonstrator = build(config.demonstrator, Policy, spec=env.spec)
    made = gather(env, config.tried, config.seed, demonstrator, config.shown)
    made.save(folder)
    return made


def _summary(experience: Experience) -> str:
    rows = len(experience.random)
    if experience.success is None:
        return (
            f"checked on {rows:,} steps; the environment has no success signal: its return decides"
        )
    won = int(experience.success.sum())
    note = "" if won >= 8 else " (too few for the AUC check)"
    return f"checked on {rows:,} steps, {won} of them successes{note}"


def save(config: Node, words: Sequence[str], folder: Path) -> None:
    """Write what a resume needs."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"config": config, "words": list(words)}, sort_keys=False)
    (folder / "design.yaml").write_text(text)
