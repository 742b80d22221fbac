"""PromptGraph: questions to a language model as a directed graph, as in SPRING (Wu et al., 2023).

The prompt of a question is the context, then each of its parents with their answers as turns of a
dialogue, then the question: it sees nothing else. Questions are asked after their parents. Answers
follow the question's schema, and are kept by the content of their prompt: the same prompt is asked
once.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from embodied.llm.chat import Chat, Message, Request

KEPT = 100_000  # answers in memory; the oldest are dropped


@dataclass(frozen=True)
class Question:
    """A node of the graph; `schema` is that of its answer."""

    name: str
    text: str
    schema: Mapping[str, Any]
    parents: tuple[str, ...] = ()


class PromptGraph:
    """Asks all questions of a graph. Thread-safe; `asked` counts the prompts that were no
    repetition."""

    def __init__(self, questions: Sequence[Question]) -> None:
        """ValueError for a name that is there twice, a parent that is not there, and a circle."""
        self.questions = {question.name: question for question in questions}
        if len(self.questions) < len(questions):
            raise ValueError("two questions have the same name")
        for question in questions:
            for parent in question.parents:
                if parent not in self.questions:
                    raise ValueError(f"{question.name} has the parent {parent}, which is not there")
        try:
            edges = {question.name: question.parents for question in questions}
            self.order = list(TopologicalSorter(edges).static_order())
        except CycleError as error:
            raise ValueError(f"questions in a circle: {' -> '.join(error.args[1])}") from error
        self.known: OrderedDict[str, Any] = OrderedDict()
        self.lock = threading.Lock()
        self.asked = 0

    def answers(self, chat: Chat, context: Sequence[Message]) -> dict[str, Any]:
        """The answer to each question by its name. ChatError if one has none."""
        found: dict[str, Any] = {}
        for name in self.order:
            found[name] = self._answer(chat, self.prompt(name, context, found), name)
        return found

    def prompt(
        self, name: str, context: Sequence[Message], found: Mapping[str, Any]
    ) -> list[Message]:
        """The messages of a question, given its parents' answers."""
        question = self.questions[name]
        messages = [*context]
        for parent in question.parents:
            messages.append(Message("user", self.questions[parent].text))
            messages.append(Message("assistant", json.dumps(found[parent])))
        return [*messages, Message("user", question.text)]

    def _answer(self, chat: Chat, messages: Sequence[Message], name: str) -> Any:
        schema = dict(self.questions[name].schema)
        key = Request(chat.name, messages, schema).key
        with self.lock:
            if key in self.known:
                return self.known[key]
        answer = chat.ask(messages, schema).data
        with self.lock:
            self.asked += 1
            self.known[key] = answer
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
        return answer
