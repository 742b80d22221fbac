"""Bad answers keep their place and do no harm; the model gets the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from embodied.core.env import VecEnv
from embodied.reward_design.designer import Experience
from embodied.reward_design.designers.language_model import Eureka, EurekaConfig
from embodied.reward_design.run import row_of
from embodied.sandbox.gate import Sandbox
from tests.reward_design.instant import BAD, LOOPS, board, search
from tests.reward_design.recorded import Recital


@pytest.mark.parametrize("name", BAD)
def test_bad_answers_are_told_apart_and_the_good_one_is_chosen(
    name: str, tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital([name, "good", name])
    here = board(tmp_path, env, experience, sandbox)
    best = search(Eureka(EurekaConfig(), chat), here, 1, 3)[0].run()
    first, second, third = here.ledger.of_round(0)
    assert re.search(BAD[name], first.problem), first.problem
    assert third.problem and third.id == 2
    assert best is not None and best == second
    assert best.origin["reply"] == chat.texts["good"]
    assert (tmp_path / "best.py").read_text() == second.source
    assert "import torch" in str(best.source) and "def distance" in str(best.source)
    assert here.ledger.finals == {1000: pytest.approx(best.fitness)}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("wrong", [name for name in BAD if name not in ("silence", "hack")])
def test_a_refusal_is_returned_to_the_model_once(
    name: str, wrong: str, tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital([[wrong, "good"]])
    here = board(tmp_path, env, experience, sandbox)
    run, said = search(LOOPS[name](chat), here, 1, 1)
    best = run.run()
    assert best is not None and best.origin["reply"] == chat.texts["good"]
    assert any(re.search(f"0  returned  .*{BAD[wrong]}", line) for line in said)
    assert best.origin["tokens"] == 14  # of both answers
    assert re.search(f"repaired: .*{BAD[wrong]}", row_of(best).replace("&#x27;", "'"))
    first, second = chat.asked
    assert second[:2] == first and second[2].text == chat.texts[wrong]
    assert re.search(BAD[wrong], second[3].text) and re.search(
        BAD[wrong], best.origin["refused"][0]
    )


@pytest.mark.parametrize("name", LOOPS)
def test_a_round_without_a_program_is_told_in_the_next(
    name: str, tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital([["crash", "wrong shape"], ["good"]])
    here = board(tmp_path, env, experience, sandbox)
    best = search(LOOPS[name](chat), here, 2, 1)[0].run()
    assert best is not None and best.round == 1
    assert chat.asked[2][2].text == chat.texts["wrong shape"]
    assert re.search(BAD["wrong shape"], chat.asked[2][3].text)
