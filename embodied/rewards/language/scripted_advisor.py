"""ScriptedAdvisor: SIMULATED language models that advise a player of Crafter by rules, for tests.

It implements the `Chat` protocol, and is both models of `instructions`. The small one writes an
analysis that names the next goals (with probability `apt`), or an empty phrase; where it is shown
examples, it does as most of them. The large one names the next goals in the order of Crafter's
technology with probability `accuracy`, times `alone` without a useful analysis; else random ones.
Results with it show that the method works, not that a language model would advise so.
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
from embodied.llm.chat import Answer, Chat, Message

ORDER = (
    *("collect_wood", "place_table", "make_wood_pickaxe", "make_wood_sword", "collect_sapling"),
    *("place_plant", "collect_drink", "eat_cow", "collect_stone", "place_stone"),
    *("make_stone_pickaxe", "make_stone_sword", "wake_up", "defeat_zombie", "collect_coal"),
    *("place_furnace", "collect_iron", "make_iron_pickaxe", "make_iron_sword", "eat_plant"),
    *("defeat_skeleton", "collect_diamond"),
)
ACHIEVED = re.compile(r"Achieved: (.*?)\.")
USEFUL = "Next: "
EMPTY = "The player should go on exploring."


@dataclass(frozen=True)
class Config:
    """Settings of the simulated models."""

    accuracy: Fraction = 1.0  # fraction of right answers of the large model with a useful analysis
    alone: Fraction = 0.3  # times this without one
    apt: Fraction = 0.5  # fraction of useful analyses of the small model, without examples
    seed: CountOrZero = 0  # decides which answers are wrong


class ScriptedAdvisor(Chat):
    """Answers with sub-goals where there is a schema, else with an analysis. The same question has
    the same answer."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = f"simulated advisor (accuracy {config.accuracy:g})"

    def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        top_logprobs: int = 0,
    ) -> Answer:
        text = messages[-1].text
        chance = random.Random(f"{self.config.seed} {seed} {text}")
        data = None
        if schema is None:
            said = self._analysis(messages, chance)
        else:
            data = {"goals": self._goals(text, schema, chance)}
            said = json.dumps(data)
        return Answer(said, data, self.name, hashlib.sha256(text.encode()).hexdigest())

    def _analysis(self, messages: Sequence[Message], chance: random.Random) -> str:
        shown = [each.text.startswith(USEFUL) for each in messages if each.role == "assistant"]
        apt = sum(shown) / len(shown) > 0.5 if shown else chance.random() < self.config.apt
        return f"{USEFUL}{', '.join(next_goals(messages[-1].text, ORDER))}." if apt else EMPTY

    def _goals(self, text: str, schema: Mapping[str, Any], chance: random.Random) -> list[str]:
        names = schema["properties"]["goals"]["items"]["enum"]
        share = 1.0 if USEFUL in text else self.config.alone
        right = chance.random() < self.config.accuracy * share
        return next_goals(text, ORDER) if right else chance.sample(names, 3)


def next_goals(text: str, order: Sequence[str]) -> list[str]:
    """The first three goals of `order` that the text does not list as achieved."""
    done = {name for names in ACHIEVED.findall(text) for name in names.split(", ")}
    left = [name for name in order if name not in done]
    return [*left, *(name for name in order if name in done)][:3]
