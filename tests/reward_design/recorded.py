"""Answers for tests of the designers: written by hand by this project's developers, no model's.

`Recital` serves them in order, as a `Chat`, and keeps what it was asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.llm.chat import Answer, BudgetSpent, ChatError, Message

FILE = Path(__file__).with_name("recorded.jsonl")


class Recital:
    """The answers named, one a question; an exception among them is raised."""

    name = "recital"

    def __init__(self, names: Sequence[str]) -> None:
        lines = [json.loads(line) for line in FILE.read_text().splitlines()]
        assert "by hand" in lines[0]["by"]
        self.texts = {line["name"]: line["text"] for line in lines[1:]}
        self.names, self.asked = list(names), list[tuple[Message, ...]]()

    def ask(
        self,
        messages: Sequence[Message],
        schema: dict[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Answer:
        at = len(self.asked)
        self.asked.append(tuple(messages))
        if at >= len(self.names):
            raise BudgetSpent("all answers are used up")
        name = self.names[at]
        if name == "silence":
            raise ChatError("the server does not answer")
        text = self.texts[name]
        data = json.loads(text) if schema is not None else None
        return Answer(text, data, self.name, f"{name}:{at}", tokens=7)
