"""Answers for tests of the designers: written by hand by this project's developers, no model's.

`Recital` serves them by seed, as a `Chat`, and keeps what it was asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from embodied.llm.chat import Answer, BudgetSpent, ChatError, Message

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
        self,
        messages: Sequence[Message],
        schema: dict[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Answer:
        with self.lock:
            before = self.heard.setdefault(seed, [])
            at = len(before)
            before.append(tuple(messages))
        name = self._name(seed, at)
        if name == "silence":
            raise ChatError("the server does not answer")
        text = self.texts[name]
        data = json.loads(text) if schema is not None else None
        return Answer(text, data, self.name, f"{name}:{seed}:{at}", tokens=7)

    def _name(self, seed: int, at: int) -> str:
        names = self.names[seed] if seed < len(self.names) else ()
        if isinstance(names, str):
            return names
        if at >= len(names):
            raise BudgetSpent("all answers are used up")
        return names[at]
