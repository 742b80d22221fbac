"""Subgoal lists for levels, from a language model or the environment's oracle, with statistics.

Words as Beacons (Ruiz-Gonzalez et al., 2024), and its error model. Invalid subgoals are counted,
not silently dropped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from embodied.core.remembered import Remembered
from embodied.core.tensors import Tensors
from embodied.llm.ask_pool import Asked, AskPool
from embodied.llm.chat import Answer, Chat, Message

logger = logging.getLogger(__name__)
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
    model), cut (beyond `most`), empty lists, unanswered requests.

    The language model is asked in the background; `synchronous`: the environment waits for it.
    """

    remembered = ("count", "answers", "missed", "requested")

    def __init__(
        self,
        kind: Kind,
        accuracy: float,
        most: int,
        chat: Chat | None,
        seed: int,
        folder: Path,
        synchronous: bool = False,
    ) -> None:
        self.kind: Kind = kind
        self.accuracy = accuracy
        self.most = most
        self.chat = chat
        self.seed = seed
        self.folder = folder
        self.pool = AskPool[str, Answer](
            lambda prompts: [self._ask(prompt) for prompt in prompts], synchronous=synchronous
        )
        self.answers: dict[str, list[str]] = {}
        self.requested: list[str] = []  # prompts that wait for an answer
        self.count: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()  # unanswered occurrences of a prompt

    def plan(self, guide: Guide, whole: Tensors, row: int) -> list[Code] | None:
        """The subgoals of env `row`'s level, in order, without invalid ones; None while the
        language model has not answered."""
        texts = self._texts(guide, whole, row)
        if texts is None:
            return None
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

    def collect(self) -> None:
        """Take in the answers that have arrived."""
        for asked in self.pool.poll():
            self.requested.remove(asked.question)
            self._take_in(asked)
        left = self.pool.discard() if self.pool.spent else []
        self.requested = [prompt for prompt in self.requested if prompt not in left]
        if left:
            logger.warning("subgoals: %s; new levels have none", self.pool.spent)

    def set_state(self, state: dict[str, Any]) -> None:
        """Prompts that were not answered yet are submitted again."""
        self.pool.clear()
        super().set_state(state)
        self.pool.submit(self.requested)

    def _texts(self, guide: Guide, whole: Tensors, row: int) -> list[str] | None:
        if self.chat is None:
            return guide.oracle(self.kind, whole, row)
        prompt = guide.question(self.kind, whole, row)
        if prompt not in self.answers:
            self._request(prompt)
            self.collect()
        if prompt in self.requested:
            return None
        if prompt not in self.answers:
            self.count["unanswered"] += 1
            return []
        return self.answers[prompt]

    def _request(self, prompt: str) -> None:
        """Have the model asked; an unanswered prompt again when it occurred twice as often."""
        if prompt in self.requested or self.pool.spent:
            return
        self.missed[prompt] += 1
        missed = self.missed[prompt]
        if missed & (missed - 1) == 0:
            self.requested.append(prompt)
            self.pool.submit([prompt])

    def _ask(self, prompt: str) -> Answer:
        assert self.chat is not None, "the oracle needs no language model"
        return self.chat.ask([Message("system", ROLE), Message("user", prompt)], SCHEMA)

    def _take_in(self, asked: Asked[str, Answer]) -> None:
        answer = asked.answer
        if answer is None:
            self._write({"question": asked.question, "subgoals": None, "why": asked.why})
            return
        subgoals = [str(text) for text in answer.data["subgoals"]]
        self.answers[asked.question] = subgoals
        source = {"model": answer.model, "key": answer.key, "cached": answer.cached}
        self._write({"question": asked.question, "subgoals": subgoals, **source})

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
