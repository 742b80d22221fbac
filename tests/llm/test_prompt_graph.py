"""Questions as a graph: order, what each sees, circles, answers kept by content."""

from __future__ import annotations

from typing import Any

import pytest

from embodied.llm.chat import ChatError, Message, object_schema
from embodied.llm.client import ChatClient, Config
from embodied.llm.prompt_graph import PromptGraph, Question
from tests.llm.server import Told, says, serving

WORD = object_schema({"word": {"type": "string"}})
CONTEXT = [Message("system", "rules"), Message("user", "scene")]


def asked(name: str, *parents: str) -> Question:
    return Question(name, f"{name}?", WORD, parents)


DIAMOND = (asked("d", "b", "c"), asked("b", "a"), asked("c", "a"), asked("a"))


def echo(request: dict[str, Any]) -> Any:
    """The answer to "x?" is the word "x!"."""
    name = request["messages"][-1]["content"][0]
    return says(f'{{"word": "{name}!"}}').body


def test_each_question_sees_its_parents_and_nothing_else() -> None:
    with serving(Told(echo)) as server:
        found = PromptGraph(DIAMOND).answers(ChatClient(Config(server.url, "m")), CONTEXT)
    assert found == {name: {"word": f"{name}!"} for name in "abcd"}
    seen = {
        sent["messages"][-1]["content"][0]: [m["content"] for m in sent["messages"][2:-1]]
        for sent in server.asked
    }
    answered = {name: [f"{name}?", f'{{"word": "{name}!"}}'] for name in "abc"}
    expected = {"a": [], "b": answered["a"], "c": answered["a"]}
    assert seen == {**expected, "d": [*answered["b"], *answered["c"]]}
    names = [sent["messages"][-1]["content"][0] for sent in server.asked]
    assert names[0] == "a" and names[-1] == "d"
    roles = [message["role"] for message in server.asked[-1]["messages"]]
    assert roles == ["system", "user", *("user", "assistant") * 2, "user"]


def test_a_prompt_is_asked_once() -> None:
    graph = PromptGraph(DIAMOND)
    with serving(Told(echo)) as server:
        chat = ChatClient(Config(server.url, "m"))
        for _ in range(3):
            graph.answers(chat, CONTEXT)
        assert len(server.asked) == graph.asked == 4
        graph.answers(chat, [*CONTEXT[:1], Message("user", "another scene")])
        assert len(server.asked) == graph.asked == 8


def test_an_answer_that_does_not_fit_is_none() -> None:
    with serving(says("no idea")) as server, pytest.raises(ChatError, match="by the schema"):
        PromptGraph(DIAMOND).answers(ChatClient(Config(server.url, "m")), CONTEXT)
    assert len(server.asked) == 2  # the first question and its repair: no other is asked


def test_graphs_that_are_none() -> None:
    for questions, why in (
        ((asked("a", "b"), asked("b", "a")), "circle: a -> b -> a|circle: b -> a -> b"),
        ((asked("a", "b"),), "a has the parent b"),
        ((asked("a"), asked("a")), "same name"),
    ):
        with pytest.raises(ValueError, match=why):
            PromptGraph(questions)
