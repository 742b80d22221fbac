"""Prompts and parsers for labelling captions with a language model.

The prompt has the goal and numbered captions; the answer is one word per number: helpful, unhelpful
or unsure; for pairs first, second or neither, asked in both orders. Unsure, missing, contradictory
or otherwise worded answers are no label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embodied.llm.chat import Answer, Chat, Message

Question = tuple[str, ...]
"""A caption, or two that are compared."""
VERSION = "1"  # of the prompts, for provenance
ROLE = (
    "You judge the play of an agent that learns to act. You are given its goal and messages that "
    "it got while it acted. Judge each message by itself: does what it tells bring the goal nearer?"
)
SINGLE = "Answer for every number: helpful, unhelpful, or unsure where you cannot tell."
PAIRED = (
    "Every number has two messages. Answer for every number which of them tells of more progress "
    "towards the goal: first, second, or neither where they are alike or you cannot tell."
)
CONTRADICTED = "another answer in the other order"
VALUES = {"helpful": 1.0, "unhelpful": 0.0}
SIDES = {"first": 1.0, "second": 0.0, "neither": 0.5}


@dataclass(frozen=True)
class Label:
    """The answer to a question. `value` None: no usable answer, and `why`; the rest is provenance
    and cost."""

    question: Question
    value: float | None
    model: str = ""
    key: str = ""
    cached: bool = False
    tokens: int = 0
    seconds: float = 0.0
    why: str = ""


class CaptionLabeller:
    """Labels captions with the language model `chat`, given the goal in words."""

    def __init__(self, chat: Chat, goal: str) -> None:
        self.chat = chat
        self.goal = goal

    def label(self, questions: Sequence[Question]) -> list[Label]:
        """One label per question: of one caption (1: helpful, 0: not), or of two (1: the first is
        better, 0: the second, 0.5: neither)."""
        if len(questions[0]) == 1:
            answer = self._ask([caption for (caption,) in questions], SINGLE, [*VALUES, "unsure"])
            return [
                labelled(q, VALUES.get(w), answer) for q, w in _words_by_question(questions, answer)
            ]
        return self._compared(questions)

    def _compared(self, questions: Sequence[Question]) -> list[Label]:
        one = self._ask([_pair(a, b) for a, b in questions], PAIRED, [*SIDES])
        other = self._ask([_pair(b, a) for a, b in questions], PAIRED, [*SIDES])
        turned = {"first": "second", "second": "first", "neither": "neither"}
        labels = []
        for (question, word), (_, back) in zip(
            _words_by_question(questions, one), _words_by_question(questions, other), strict=True
        ):
            agreed = word in turned and turned[word] == back
            labels.append(labelled(question, SIDES[word] if agreed else None, one, other))
            if not agreed and word in turned and back in turned:
                labels[-1] = replace(labels[-1], why=CONTRADICTED)
        return labels

    def _ask(self, lines: Sequence[str], how: str, words: Sequence[str]) -> Answer:
        listed = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
        text = f"Goal: {self.goal}\n{how}\n{listed}"
        return self.chat.ask([Message("system", ROLE), Message("user", text)], schema(lines, words))


def schema(lines: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """JSON schema of an object with one of `words` for each number."""
    keys = [str(number) for number in range(1, len(lines) + 1)]
    one = {"type": "string", "enum": list(words)}
    return {
        "type": "object",
        "properties": dict.fromkeys(keys, one),
        "required": keys,
        "additionalProperties": False,
    }


def labelled(question: Question, value: float | None, answer: Answer, *more: Answer) -> Label:
    """A label with its provenance; several answers belong to one question in several orders."""
    every = (answer, *more)
    return Label(
        question,
        value,
        model=answer.model,
        key=answer.key,
        cached=all(one.cached for one in every),
        tokens=sum(one.tokens for one in every),
        seconds=sum(one.seconds for one in every),
        why="" if value is not None else "abstained",
    )


def _pair(first: str, second: str) -> str:
    return f"first: {first} | second: {second}"


def _words_by_question(questions: Sequence[Question], answer: Answer) -> list[tuple[Question, str]]:
    data = answer.data if isinstance(answer.data, Mapping) else {}
    return [(q, str(data.get(str(number), ""))) for number, q in enumerate(questions, 1)]
