"""Lists of subgoals for levels: asked of a language model or of the world, and audited.

Source: Words as Beacons (Ruiz-Gonzalez et al., 2024), and its model of error. Subgoals that are not
there are counted, not silently dropped.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.llm.chat import Chat, ChatError, Message

Kind = Literal["position", "object", "language"]
Code = tuple[int, int, int]


ROLE = (
    "You help an agent that learns to act in a grid world. Given a mission and what there is in "
    "the level, you list the subgoals on the way, the first one first, and nothing else."
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"subgoals": {"type": "array", "items": {"type": "string"}}},
    "required": ["subgoals"],
    "additionalProperties": False,
}


class Guide(Protocol):
    """What a world knows of subgoals; `whole` is what its `privileged/*` observations show."""

    limit: int
    """Steps of an episode, at most."""

    def question(self, kind: str, whole: Tensors, row: int) -> str:
        """A row's level and the form of subgoals, in words."""
        ...

    def oracle(self, kind: str, whole: Tensors, row: int) -> list[str]:
        """The right subgoals."""
        ...

    def understood(self, text: str, whole: Tensors, row: int) -> Code | None:
        """A subgoal by number, None for what is not there."""
        ...

    def mistaken(self, kind: str, text: str, whole: Tensors, row: int, seed: int) -> str:
        """A wrong one in the place of `text`."""
        ...

    def reached(self, codes: Tensor, before: Tensors, after: Tensors) -> Tensor:
        """Whether each row's subgoal [B, 3] happened: [B] (bool)."""
        ...


class Planner:
    """Lists of subgoals for levels. `count`: plans made, subgoals named, null (not there), wrong
    (by the model of error), cut (beyond `most`), plans that are empty, or that nobody gave."""

    def __init__(
        self, kind: Kind, accuracy: float, most: int, chat: Chat | None, seed: int, folder: Path
    ) -> None:
        self.kind, self.accuracy, self.most = kind, accuracy, most
        self.chat, self.seed, self.folder = chat, seed, folder
        self.answers: dict[str, list[str]] = {}
        self.count: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()  # how often a question came up without an answer

    def plan(self, guide: Guide, whole: Tensors, row: int) -> list[Code]:
        """The subgoals of a row's level, in order, without those that are not there."""
        texts = self._texts(guide, whole, row)
        if self.accuracy < 1:
            texts = self._erring(texts, guide, whole, row)
        codes = [guide.understood(text, whole, row) for text in texts]
        there = [code for code in codes if code is not None]
        self.count.update(
            {
                "plans": 1,
                "named": len(texts),
                "null": len(texts) - len(there),
                "cut": max(len(there) - self.most, 0),
                "empty": not there,
            }
        )
        return there[: self.most]

    def _texts(self, guide: Guide, whole: Tensors, row: int) -> list[str]:
        kind = self.kind
        if self.chat is None:
            return guide.oracle(kind, whole, row)
        question = guide.question(kind, whole, row)
        if question not in self.answers and not self._answered(question):
            self.count["unanswered"] += 1
            return []
        return self.answers[question]

    def _answered(self, question: str) -> bool:
        """Ask; what nobody answers is asked again when it came up twice as often."""
        assert self.chat is not None, "an oracle is not asked in words"
        missed = self.missed[question] = self.missed[question] + 1
        if missed & (missed - 1):
            return False
        try:
            answer = self.chat.ask([Message("system", ROLE), Message("user", question)], SCHEMA)
        except ChatError as error:
            self._write({"question": question, "subgoals": None, "why": str(error)})
            return False
        subgoals = self.answers[question] = [str(text) for text in answer.data["subgoals"]]
        source = {"model": answer.model, "key": answer.key, "cached": answer.cached}
        self._write({"question": question, "subgoals": subgoals, **source})
        return True

    def _erring(self, texts: list[str], guide: Guide, whole: Tensors, row: int) -> list[str]:
        """Each of `texts` or, as the level and the seed have it, a wrong one."""
        level = whole["grid"][row].cpu().numpy().tobytes()
        digest = hashlib.sha256(f"{self.seed}".encode() + level).digest()
        chance = random.Random(int.from_bytes(digest[:8], "big"))
        kept: list[str] = []
        for text in texts:
            right, seed = chance.random() < self.accuracy, chance.getrandbits(32)
            self.count["wrong"] += not right
            kept.append(text if right else guide.mistaken(self.kind, text, whole, row, seed))
        return kept

    def _write(self, facts: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "plans.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")
