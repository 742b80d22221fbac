"""ScriptedExperimenter: a SIMULATED language model that plans experiments by rules, for tests.

It implements the `Chat` protocol and gets the same messages as a language model. It splits a task
at "and", chooses a task that was not trained yet, with the fewest sub-tasks, of these the one with
most of them in the library, and takes the skill of the library with most words in common. With
probability `error` an answer is drawn from its closed list: `error=1` is a random order. Results
with it show that the experiments run, not that a language model would plan so.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodied.core.bounds import CountOrZero, Fraction
from embodied.experimenter.skills import NONE
from embodied.llm.chat import Answer, Chat, Message

RATES = re.compile(r"in the order of training: ([\d. ]+)\.")
LIBRARY = re.compile(r"Library of skills: (.*)\.")
SHARE = 0.6  # of a sub-task's words in a skill that does it


@dataclass(frozen=True)
class Config:
    """Settings of the simulated experimenter."""

    error: Fraction = 0.0  # share of answers that are drawn at random
    seed: CountOrZero = 0  # of these answers


class ScriptedExperimenter(Chat):
    """Answers by the schema; the same question has the same answer."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = f"simulated experimenter (error {config.error:g})"

    def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        top_logprobs: int = 0,
    ) -> Answer:
        text = "\n".join(message.text for message in messages)
        chance = random.Random(f"{self.config.seed} {text}")
        wrong = chance.random() < self.config.error
        before: dict[str, Any] = {}
        for message in messages:
            if message.role == "assistant":
                before |= json.loads(message.text)
        data = {
            name: _drawn(kind, chance)
            if wrong and _choices(kind)
            else _value(name, text, kind, before)
            for name, kind in (schema or {}).get("properties", {}).items()
        }
        return Answer(json.dumps(data), data, self.name, hashlib.sha256(text.encode()).hexdigest())


def subtasks(task: str) -> list[str]:
    """The parts of a sentence that "and" joins."""
    return [part.strip() for part in task.split(" and ")]


def matching(task: str, skills: Sequence[str]) -> str:
    """The skill with the largest share of the words of `task`, at least SHARE, or "none"."""
    words = set(task.split())
    shares = {name: len(words & set(name.split())) / len(words) for name in skills}
    best = max(shares, key=lambda name: shares[name], default=NONE)
    return best if shares.get(best, 0.0) >= SHARE else NONE


def _choices(kind: Mapping[str, Any]) -> list[str]:
    return kind.get("enum") or kind.get("items", {}).get("enum") or []


def _drawn(kind: Mapping[str, Any], chance: random.Random) -> Any:
    drawn = chance.choice(_choices(kind))
    return drawn if "enum" in kind else [drawn]


def _value(name: str, text: str, kind: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    if name == "task":
        return _simplest(kind["enum"], text)
    if name == "subtasks":
        return subtasks(before["task"])
    if name == "skills":
        known = [skill for skill in kind["items"]["enum"] if skill != NONE]
        return [matching(task, known) for task in before["subtasks"]]
    if name == "start":
        return next((skill for skill in before["skills"] if skill != NONE), NONE)
    if name == "converged":
        rates = [float(rate) for rate in RATES.findall(text)[-1].split()][-4:]
        return max(rates) - min(rates) < 0.15
    return "by rules"


def _simplest(tasks: Sequence[str], text: str) -> str:
    """A task that was not trained yet, with the fewest sub-tasks; of these, with most of them in
    the library."""
    library = LIBRARY.findall(text)[-1].split("; ")

    def effort(task: str) -> tuple[bool, int, float, int]:
        parts = subtasks(task)
        known = sum(matching(part, library) != NONE for part in parts)
        tried = f"- {task}: not trained yet" not in text
        return tried, len(parts), -known / len(parts), len(task.split())

    return min(tasks, key=effort)
