"""The search: it chooses the best program, ends with what it has, and resumes from its journal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied.core.env import VecEnv
from embodied.nn.statistics import auc_of_samples
from embodied.reward_design.designer import Candidate, Experience
from embodied.reward_design.designers import grammar
from embodied.reward_design.designers.language_model import Eureka, EurekaConfig
from embodied.sandbox.gate import Sandbox
from tests.reward_design.instant import board, search
from tests.reward_design.recorded import Recital


def test_a_model_that_stops_answering_ends_the_search_with_what_there_is(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    chat = Recital(["good"])
    here = board(tmp_path, env, experience, sandbox)
    run, said = search(Eureka(EurekaConfig(), chat), here, 5, 1)
    best = run.run()
    assert best is not None and best.id == 0
    assert "  the budget of the model is spent: the search ends" in said
    assert sorted(here.ledger.rounds) == [0, 1]


def test_no_valid_program_is_an_end_too(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    here = board(tmp_path, env, experience, sandbox)
    run, _ = search(Eureka(EurekaConfig(), Recital(["prose"] * 4)), here, 2, 2)
    assert run.run() is None and len(here.ledger.candidates) == 4


def test_a_search_goes_on_from_its_ledger(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    """Stopped after the first training of a round: nothing is asked or trained twice."""
    chat = Recital(["good", "two fences", "better"])
    here = board(tmp_path, env, experience, sandbox)
    run, _ = search(Eureka(EurekaConfig(), chat), here, 1, 3)

    def stop(line: str) -> None:
        if "auc" in line:
            raise KeyboardInterrupt

    run.tell = stop
    with pytest.raises(KeyboardInterrupt):
        run.run()
    with (tmp_path / "design.jsonl").open("a") as sink:
        sink.write('{"event": "candidate", "id": 9, "rou')  # killed in a line
    again = board(tmp_path, env, experience, sandbox)
    assert sum(bool(c.scores) for c in again.ledger.candidates.values()) == 1
    silent = Recital([])
    run, _ = search(Eureka(EurekaConfig(), silent), again, 1, 3)
    best = run.run()
    assert silent.asked == [] and best is not None
    assert len([n for n, _ in run.trials.trained if n.startswith("candidates")]) == 2  # type: ignore[attr-defined]
    assert all(c.trained for c in again.ledger.candidates.values())


def test_halving_trains_all_a_little_and_the_best_third_to_the_end(
    tmp_path: Path, env: VecEnv, experience: Experience, sandbox: Sandbox
) -> None:
    here = board(tmp_path, env, experience, sandbox)
    designer = grammar.Grammar(grammar.Config())
    run, _ = search(designer, here, 1, 6, halving=True)
    best = run.run()
    steps = [s for name, s in run.trials.trained if name.startswith("cand")]  # type: ignore[attr-defined]
    assert steps == [500] * 6 + [1000] * 2
    assert best is not None and best.trained


def test_auc_by_hand() -> None:
    """Pairs (3, 1) (3, 2) (2, 1) win, (2, 2) is half: 3.5 of 4."""
    assert auc_of_samples(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 2.0])) == pytest.approx(
        3.5 / 4
    )


def test_order_is_by_the_best_then_by_all() -> None:
    def tried(*values: float) -> Candidate:
        return Candidate(0, 0, "", "", {}, scores=list(enumerate(values)))

    assert tried(0.0, 1.0).order > tried(0.9, 0.9).order
    assert tried(0.5, 1.0).order > tried(0.0, 1.0).order > Candidate(0, 0, "", "", {}).order
