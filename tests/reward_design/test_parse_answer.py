"""Extraction of the program from an answer."""

from __future__ import annotations

import pytest

from embodied.reward_design.prompts import extract
from tests.reward_design.recorded import Recital


def fenced(body: str, fence: str = "```") -> str:
    return f"{fence}python\ndef reward(x):\n    return {body}\n{fence}\n"


DRAFT = fenced("-x + 0 * x  # a longer draft with the wrong sign")
EXTRACTED = {
    "the last block": DRAFT + "No, the other way round:\n" + fenced("x"),
    "reasoning": f"<think>{DRAFT}</think>\n{fenced('x')}",
    "reasoning without its start": f"{DRAFT}</think>\n{fenced('x')}",
    "reasoning after the answer": f"{fenced('x')}\n<think>Or perhaps\n{DRAFT}",
    "tildes": fenced("x", "~~~"),
    "longer fences": fenced("x", "````"),
    "a block that is not closed": fenced("x") + "or\n```python\ndef reward(x):\n    return -x",
    "a block of another kind": fenced("x") + "```\npip install nothing\n```\n",
    "an indented block": "1. So:\n   " + fenced("x").replace("\n", "\n   "),
    "windows": fenced("x").replace("\n", "\r\n"),
}


@pytest.mark.parametrize("name", EXTRACTED)
def test_extraction_takes_the_last_complete_block(name: str) -> None:
    assert extract(EXTRACTED[name]).source == "def reward(x):\n    return x\n"


def test_extraction_keeps_helpers_and_says_what_is_missing() -> None:
    found = extract(Recital([]).texts["two fences"])
    assert found.source is not None and "x * 1.0" in found.source
    problem = extract(f"<think>Let me see\n{DRAFT}").problem
    assert "ends within its reasoning" in problem and "max_tokens" in problem
    assert extract(fenced("x"), ("sparse", "dense")).problem.endswith("sparse and dense")
