"""Answers for the designers, by hand and no model's; a search whose trainings take no time: each is
replaced by a measure of the program itself, so that the loop is tested alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.llm.chat import Answer, BudgetSpent, ChatError, Message
from embodied.nn.statistics import auc_of_samples
from embodied.reward_design.designer import Board, Designer, Experience, Journal
from embodied.reward_design.designers.language_model import (
    Eureka,
    EurekaConfig,
    Text2Reward,
    Text2RewardConfig,
)
from embodied.reward_design.run import Budget, Job, Outcome, Search, Trials
from embodied.rewards.handcrafted.program import inputs, known, variables
from embodied.sandbox.gate import Sandbox

FILE = Path(__file__).with_name("recorded.jsonl")


class Recital:
    """`names[seed]` are the answers to the requests with that seed: one name for all of them, or a
    name for each. Where they end, the budget is spent. Thread-safe."""

    name = "recital"

    def __init__(self, names: Sequence[str | Sequence[str]]) -> None:
        lines = [json.loads(line) for line in FILE.read_text().splitlines()]
        assert "by hand" in lines[0]["by"]
        self.texts = {line["name"]: line["text"] for line in lines[1:]}
        self.names, self.lock = list(names), Lock()
        self.heard = dict[int, list[tuple[Message, ...]]]()

    @property
    def asked(self) -> list[tuple[Message, ...]]:
        """All requests, by seed."""
        return [messages for seed in sorted(self.heard) for messages in self.heard[seed]]

    def ask(
        self, messages: Sequence[Message], schema: Any = None, temperature: float = 0, seed: int = 0
    ) -> Answer:
        with self.lock:
            before = self.heard.setdefault(seed, [])
            at = len(before)
            before.append(tuple(messages))
        names = self.names[seed] if seed < len(self.names) else ()
        if not isinstance(names, str) and at >= len(names):
            raise BudgetSpent("all answers are used up")
        name = names if isinstance(names, str) else names[at]
        if name == "silence":
            raise ChatError("the server does not answer")
        text = self.texts[name]
        data = json.loads(text) if schema is not None else None
        return Answer(text, data, self.name, f"{name}:{seed}:{at}", tokens=7)


WORLD = {"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 16}


class Instant(Trials):
    """A training's place is taken by how well the program tells success from chance, times how far
    training came."""

    experience: Experience
    sandbox: Sandbox
    trained: list[tuple[str, int]]

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        for job in reversed(jobs):  # they end in any order
            self.trained.append((job.name, job.steps))
            yield job, self._measure(job)

    def _measure(self, job: Job) -> Outcome:
        env = build(WORLD, VecEnv)
        found = variables(env.spec)
        given = inputs(found, tuple(known(env.spec)), self.experience.rows)
        (program,) = (w.partition("=")[2] for w in job.words if w.startswith("reward.file="))
        paid = self.sandbox.gate(Path(program).read_text(), given)(given)
        won = self.experience.success
        assert won is not None
        value = auc_of_samples(paid.total[won], paid.total[~won]) * job.steps / self.budget.steps
        term = {
            name: [float(p.mean()), float(p.min()), float(p.max())]
            for name, p in paid.components.items()
        }
        terms = [{"step": i * 100, "terms": term} for i in range(1, 11)]
        return Outcome([(job.steps // 2, value / 2), (job.steps, value)], terms)


def board(folder: Path, env: VecEnv, experience: Experience, sandbox: Sandbox) -> Board:
    found = variables(env.spec)
    return Board(
        "go to the goal",
        "",
        env.spec,
        found,
        Journal(folder),
        experience,
        lambda source: experience.check(sandbox, found, source),
        0,
    )


def search(
    designer: Designer, here: Board, rounds: int, samples: int, halving: bool = False
) -> tuple[Search, list[str]]:
    trials = Instant(here.ledger.folder, [], Budget(steps=1000, eval_every=100, halving=halving))
    trials.experience, trials.sandbox, trials.trained = here.experience, Sandbox(), []
    said: list[str] = []
    return Search(designer, here, trials, rounds, samples, 1, said.append), said


BAD = {
    "no fence": "no code block",
    "truncated": "not closed",
    "prose": "no code block",
    "empty": "no code block",
    "wrong name": "no code block has the function reward",
    "not Python": "no code block is Python",
    "import os": "language: line 1: os cannot be imported",
    "infinite loop": "process: it computes longer",
    "NaN": "result: .*nan",
    "wrong shape": r"result: .*shape \[64, 2\]",
    "other device": "program: line 2: ",
    "unknown input": "signature: .*asks for success",
    "crash": "program: line 2: IndexError",
    "constant": "constant: .*same in every row",
    "hack": "auc: ",
    "silence": "no answer: the server",
}

LOOPS: dict[str, Callable[[Recital], Designer]] = {
    "eureka": lambda chat: Eureka(EurekaConfig(), chat),
    "text2reward": lambda chat: Text2Reward(Text2RewardConfig(), chat),
}
