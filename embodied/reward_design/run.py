"""Runs a reward design from its configuration: experience, designer, search and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, Node, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.llm.client import open_chat
from embodied.reward_design import report
from embodied.reward_design.description import about
from embodied.reward_design.designer import Board, Designer
from embodied.reward_design.designers.grammar import drawn_at_random
from embodied.reward_design.experience import Experience, gather
from embodied.reward_design.journal import FILE, Journal
from embodied.reward_design.search import Search, Tell, folder_of
from embodied.reward_design.trial import Budget, Trials
from embodied.rewards.handcrafted.program import variables
from embodied.sandbox.gate import Sandbox

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
    context = {"chat": chat} if chat else {}
    designer = build(config.designer, Designer, **context)
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
    search = Search(designer, board, trials, config.rounds, config.samples, config.finals, tell)
    best = search.run()
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
    report.write(ledger, facts)
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
