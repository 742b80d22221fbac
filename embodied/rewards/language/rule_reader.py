"""RuleReader: a SIMULATED language model that labels captions by regular expressions, for tests.

It implements the `Chat` protocol and sees the same text as a language model. A caption is helpful
if one of the patterns matches. Errors, refusals, invalid answers and latency are configurable;
which captions are labelled wrongly depends on their text and the seed alone. Results with it show
that the method works, not that a language model would answer so.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embodied.core.bounds import CountOrZero, Fraction, NonNegative
from embodied.llm.chat import Answer, Chat, ChatError, Message

LINE = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE)
PAIR = re.compile(r"^first: (.*) \| second: (.*)$")


@dataclass(frozen=True)
class Config:
    """Settings of the simulated language model."""

    helpful: tuple[str, ...] = (r"unlocked", r"picked up", r"opened")  # patterns, the best first
    error: Fraction = 0.0  # fraction of captions or pairs that are labelled wrongly
    refusal: Fraction = 0.0  # fraction of captions or pairs without an answer
    broken: Fraction = 0.0  # fraction of requests with an invalid answer
    latency: NonNegative = 0.0  # s per request
    seed: CountOrZero = 0  # decides which captions are labelled wrongly


class RuleReader(Chat):
    """A Chat that labels numbered captions, and pairs of them, by rules."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = f"simulated(error={config.error:g}, refusal={config.refusal:g})"
        self.rules = [re.compile(pattern) for pattern in config.helpful]
        self.calls = 0

    def ask(
        self,
        messages: Sequence[Message],
        schema: dict[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Answer:
        """The labels of every numbered line of the last message."""
        began, text = time.perf_counter(), messages[-1].text
        self.calls += 1
        if self.config.latency:
            time.sleep(self.config.latency)
        if self._chance("broken", f"{self.calls}{text}") < self.config.broken:
            raise ChatError(f"{self.name}: the answer is not JSON")
        data = {number: self._said(line) for number, line in LINE.findall(text)}
        key = hashlib.sha256(f"{self.name}{self.config}{text}".encode()).hexdigest()
        seconds = time.perf_counter() - began
        return Answer(json.dumps(data), data, self.name, key, tokens=0, seconds=seconds)

    def worth(self, caption: str) -> int:
        """0 for what does not help; more, the nearer to the goal."""
        places = (i for i, rule in enumerate(self.rules) if rule.search(caption))
        return len(self.rules) - next(places, len(self.rules))

    def _said(self, line: str) -> str:
        pair = PAIR.match(line)
        if pair is not None:
            return self._compared(*pair.groups())
        if self._chance("refusal", line) < self.config.refusal:
            return "unsure"
        wrong = self._chance("error", line) < self.config.error
        return "helpful" if (self.worth(line) > 0) != wrong else "unhelpful"

    def _compared(self, first: str, second: str) -> str:
        """The same in both orders: chance sees the pair without its order."""
        words = " | ".join(sorted((first, second)))
        if self._chance("refusal", words) < self.config.refusal:
            return "unsure"
        ahead = self.worth(first) - self.worth(second)
        if self._chance("error", words) < self.config.error:
            ahead = -ahead
        return "neither" if ahead == 0 else "first" if ahead > 0 else "second"

    def _chance(self, kind: str, words: str) -> float:
        """A number in [0, 1) that depends on the seed and the words."""
        digest = hashlib.sha256(f"{self.config.seed}/{kind}/{words}".encode()).digest()
        return int.from_bytes(digest[:7], "big") / 2**56
