"""`embodied reward design` against a tiny real model that `transformers serve` serves, and against
its recorded answers: fitted to one conversation, it repairs a program that was refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied.core.env import VecEnv
from embodied.llm.chat import Message
from embodied.reward_design import prompts
from embodied.reward_design.designer import Experience, Journal
from embodied.reward_design.designers.language_model import Eureka, EurekaConfig
from embodied.reward_design.prompts import about, extract
from embodied.sandbox.gate import Sandbox
from tests.builders import exit_of
from tests.llm.tiny_model import served, write_model
from tests.reward_design.instant import Recital, board
from tests.reward_design.test_command import LEARN
from tests.tiers import only_all

REASON = "signature: reward asks for success"
WORDS = ["go to the goal", "env=two_gap", "designer=eureka", "designer.temperature=0.2"]
SIZES = ["rounds=1", "samples=2", "finals=0", "tried=256", LEARN]
BUDGET = ["budget.steps=256", "budget.eval_every=256", "budget.halving=false"]


@pytest.fixture(scope="module")
def endpoint(
    tmp_path_factory: pytest.TempPathFactory, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> Iterator[list[str]]:
    """A served model that knows one conversation: the request of the designer, a program that is
    refused, the reason, and a program that is accepted."""
    chat, folder = Recital([]), tmp_path_factory.mktemp("board")
    here = replace(board(folder, env, experience, sandbox), about=about(env))
    wrong, right = chat.texts["unknown input"], chat.texts["good"]
    verdict = here.check(str(extract(wrong).source))
    reason = prompts.refusal(f"{verdict.layer}: {verdict.problem}")
    asked = Eureka(EurekaConfig(), chat).messages(here, 0)
    said = [Message("assistant", wrong), Message("user", reason), Message("assistant", right)]
    model = write_model(folder / "fitted", [*asked, *said], updates=100)
    with served(model) as url:
        yield ["chat=endpoint", f"chat.url={url}", f"chat.model={model}"]


def design(*words: str) -> int | str:
    return exit_of("reward", "design", *WORDS, *SIZES, *BUDGET, *words)


def origins(folder: Path) -> list[dict[str, Any]]:
    return [candidate.origin for candidate in Journal(folder).candidates.values()]


@only_all  # without a model: test_designers.py
def test_a_served_model_repairs_a_refused_program_and_its_answers_are_recorded(
    tmp_path: Path, endpoint: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    out, again, cache = tmp_path / "served", tmp_path / "recorded", tmp_path / "chat.jsonl"
    assert design(*endpoint, f"chat.cache={cache}", f"out={out}") == 0
    assert capfd.readouterr().out.count(f"returned  {REASON}") == 2
    for origin in origins(out):
        assert origin["refused"][0].startswith(REASON) and not origin["cached"]
        assert REASON in origin["asked"][3][1]
    assert "GOAL_X" in (out / "best.py").read_text()
    lines = cache.read_text().splitlines()
    assert len(lines) == 4 and all(json.loads(line)["served"] for line in lines)
    assert design("chat=cached", f"chat.cache={cache}", f"out={again}") == 0
    assert [o["reply"] for o in origins(again)] == [o["reply"] for o in origins(out)]
    assert all(origin["cached"] and origin["refused"] for origin in origins(again))
    assert (again / "best.py").read_text() == (out / "best.py").read_text()
