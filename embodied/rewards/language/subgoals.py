"""Subgoal lists for levels, from a language model or the environment's oracle, with statistics.

Words as Beacons (Ruiz-Gonzalez et al., 2024), and its error model. Invalid subgoals are counted,
not silently dropped.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from embodied.core.remembered import Remembered
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
    """An environment's knowledge of subgoals; `whole` are its `privileged/*` observations."""

    limit: int
    """Maximum steps of an episode."""

    def question(self, kind: str, whole: Tensors, row: int) -> str:
        """The prompt: the level of env `row` and the form of subgoals, in words."""
        ...

    def oracle(self, kind: str, whole: Tensors, row: int) -> list[str]:
        """The correct subgoals."""
        ...

    def understood(self, text: str, whole: Tensors, row: int) -> Code | None:
        """A subgoal parsed to its code; None if it does not exist in the level."""
        ...

    def mistaken(self, kind: str, text: str, whole: Tensors, row: int, seed: int) -> str:
        """A wrong subgoal in place of `text`."""
        ...

    def reached(self, codes: Tensor, before: Tensors, after: Tensors) -> Tensor:
        """Whether each env's subgoal [B, 3] was reached in this step: [B] (bool)."""
        ...


class Planner(Remembered):
    """Makes subgoal lists. `count`: lists, subgoals named, null (not in the level), wrong (error
    model), cut (beyond `most`), empty lists, unanswered requests."""

    remembered = ("count", "answers", "missed")

    def __init__(
        self, kind: Kind, accuracy: float, most: int, chat: Chat | None, seed: int, folder: Path
    ) -> None:
        self.kind, self.accuracy, self.most = kind, accuracy, most
        self.chat, self.seed, self.folder = chat, seed, folder
        self.answers: dict[str, list[str]] = {}
        self.count: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()  # unanswered occurrences of a prompt

    def plan(self, guide: Guide, whole: Tensors, row: int) -> list[Code]:
        """The subgoals of env `row`'s level, in order, without invalid ones."""
        texts = self._texts(guide, whole, row)
        if self.accuracy < 1:
            texts = self._with_errors(texts, guide, whole, row)
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
        """Ask the model; an unanswered prompt is retried when it occurred twice as often."""
        assert self.chat is not None, "the oracle needs no language model"
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

    def _with_errors(self, texts: list[str], guide: Guide, whole: Tensors, row: int) -> list[str]:
        """`texts`, each replaced by a wrong one as the level and the seed determine."""
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
