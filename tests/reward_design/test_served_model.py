"""`embodied reward design` against a real model that `transformers serve` serves, and against its
recorded answers.

The model is tiny. Fitted to two conversations written by hand, it answers with a program that is
refused, and repairs it when it gets the reason; with random weights it answers with noise. Nothing
here says what a language model can do.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied import cli
from embodied.core.env import VecEnv
from embodied.llm.chat import Message
from embodied.reward_design import prompts
from embodied.reward_design.designer import Experience, Journal
from embodied.reward_design.designers.language_model import Eureka, EurekaConfig
from embodied.reward_design.prompts import about, extract
from embodied.sandbox.gate import Sandbox
from tests.llm.tiny_model import served, write_model
from tests.reward_design.instant import board
from tests.reward_design.recorded import Recital
from tests.reward_design.test_command import LEARN

REASON = "signature: reward asks for success"
WORDS = ["go to the goal", "env=two_gap", "designer=eureka", "designer.temperature=0.2"]
SIZES = ["rounds=1", "samples=2", "finals=1", "tried=256", LEARN]
BUDGET = ["budget.steps=512", "budget.eval_every=256", "budget.halving=false"]


@pytest.fixture(scope="module")
def conversations(
    tmp_path_factory: pytest.TempPathFactory,
    env: VecEnv,
    experience: Experience,
    sandbox: Sandbox,
) -> list[list[Message]]:
    """The request of the designer with a program that is refused; the same, the reason, and a
    program that is accepted."""
    chat = Recital([])
    here = board(tmp_path_factory.mktemp("board"), env, experience, sandbox)
    here = replace(here, about=about(env))
    wrong, right = chat.texts["unknown input"], chat.texts["good"]
    verdict = here.check(str(extract(wrong).source))
    reason = prompts.refusal(f"{verdict.layer}: {verdict.problem}")
    first = Eureka(EurekaConfig(), chat).messages(here, 0)
    first = [*first, Message("assistant", wrong)]
    return [first, [*first, Message("user", reason), Message("assistant", right)]]


def design(code: int, *words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["reward", "design", *WORDS, *SIZES, *BUDGET, *words])
    assert stop.value.code == code


def endpoint(url: str, model: Path, folder: Path) -> list[str]:
    cache = f"chat.cache={folder / 'chat.jsonl'}"
    return ["chat=endpoint", f"chat.url={url}", f"chat.model={model}", cache]


def origins(folder: Path) -> list[dict[str, Any]]:
    return [candidate.origin for candidate in Journal(folder).candidates.values()]


def test_a_served_model_repairs_a_refused_program_and_its_answers_are_recorded(
    tmp_path: Path, conversations: list[list[Message]], capfd: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "served", tmp_path / "recorded"
    model = write_model(tmp_path / "fitted", conversations, updates=150)
    with served(model) as url:
        design(0, *endpoint(url, model, tmp_path), f"out={out}")
    shown = capfd.readouterr().out
    assert "seed 1000: " in shown and shown.count(f"returned  {REASON}") == 2
    for origin in origins(out):
        assert origin["refused"][0].startswith(REASON) and not origin["cached"]
        assert REASON in origin["asked"][3][1]
    assert "GOAL_X" in (out / "best.py").read_text()
    lines = (tmp_path / "chat.jsonl").read_text().splitlines()
    assert len(lines) == 4 and all(json.loads(line)["served"] for line in lines)
    cached = ["chat=cached", f"chat.cache={tmp_path / 'chat.jsonl'}"]
    design(0, *cached, f"out={again}")
    assert [o["reply"] for o in origins(again)] == [o["reply"] for o in origins(out)]
    assert all(origin["cached"] and origin["refused"] for origin in origins(again))
    assert (again / "best.py").read_text() == (out / "best.py").read_text()


def test_a_model_that_answers_with_noise_ends_in_one_line(
    tmp_path: Path, conversations: list[list[Message]], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "noise"
    model = write_model(tmp_path / "random", conversations, updates=0)
    capfd.readouterr()
    with served(model) as url:
        design(2, *endpoint(url, model, tmp_path), "chat.max_tokens=64", f"out={out}")
    captured = capfd.readouterr()
    assert captured.err.count("\n") == 1 and "no valid program; see" in captured.err
    assert captured.out.count("rejected  answer: there is no code block") == 2
    assert all(len(origin["refused"]) == 1 for origin in origins(out))
