"""Runs a reward design from its configuration: experience, designer, search and report."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, Node, build
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
    gather,
)
from embodied.reward_design.designers.grammar import drawn_at_random
from embodied.reward_design.prompts import about, curves, line
from embodied.reward_design.search import Budget, Search, Tell, Trials, folder_of
from embodied.rewards.handcrafted.program import variables
from embodied.sandbox.gate import Sandbox

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
        lambda candidate: folder_of(ledger, candidate),
    )
    lock = f"reward.require_lock={str(config.require_lock).lower()}"
    trials = Trials(folder, [*words, *config.learn], config.budget, (lock,))
    best = Search(designer, board, trials, config.rounds, config.samples, config.finals, tell).run()
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
