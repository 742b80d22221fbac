"""`embodied reward design` for real: programs train in processes of their own, and are compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.reward_design.designer import Board, Experience, Journal, Verdict
from embodied.reward_design.designers.language_model import digests
from embodied.reward_design.run import Budget, Job, Trials, thinned
from embodied.rewards.handcrafted.program import variables
from tests.builders import exit_of

LEARN = (
    "learn=policy=diagonal_gaussian learner=ppo env.num_envs=16 learner.horizon=16 "
    "learner.epochs=1 log_every=256 eval.episodes=8 eval.num_envs=8"
)


def test_a_design_trains_chooses_and_reports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sizes = ["rounds=1", "samples=2", "finals=1", "tried=256", "controls=1"]
    budget = ["budget.steps=512", "budget.eval_every=256", "budget.halving=false"]
    words = ["go to the goal", "env=two_gap", f"out={out}", LEARN, *sizes, *budget]
    assert exit_of("reward", "design", *words) == 0
    printed = capfd.readouterr().out
    assert "task  go to the goal" in printed and "seed 1000: " in printed
    ledger = Journal(out)
    first, second = ledger.candidates.values()
    assert first.trained and second.trained and first.digest != second.digest
    assert [step for step, _ in first.scores] == [256, 512]
    assert first.terms and set(first.terms[0]["terms"]) >= {"total"}
    assert list(ledger.finals) == [1000]
    report = (out / "report.md").read_text()
    assert "Retrained with fresh seeds" in report and str(first.digest[:8]) in report
    assert (out / "fitness.svg").read_text().startswith("<svg xmlns=")
    assert (out / "best.py").exists() and (out / "control-0.py").exists()
    before = (out / "design.jsonl").read_text()
    assert exit_of("reward", "design", f"resume={out}") == 0  # nothing trains again
    assert (out / "design.jsonl").read_text() == before
    assert json.loads(before.splitlines()[0])["event"] == "candidate"
    spec = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1}, VecEnv).spec
    tried = Experience.load(out)
    board = Board("", "", spec, variables(spec), ledger, tried, lambda _: Verdict(), 0)
    told = digests(board, first, episodes=3, last=4)  # 512 steps teach nothing: all fail
    episodes = told.split("\n\n")
    assert len(episodes) == 3 and episodes[0].startswith("episode 1\nstate ")
    assert all(len(text.splitlines()) == 1 + 4 for text in episodes) and "; action " in told


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("push", "it", "env=two_gap"), "one quoted sentence"),
        (("resume=nowhere",), "no design found in"),
        (("x", "env=two_gap", "designer=grammer", "out=nowhere"), 'did you mean "grammar"'),
        (("x", "env=two_gap", "designer=eureka", "out=nowhere", "tried=256"), "chat"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [word.replace("nowhere", str(tmp_path / "nowhere")) for word in words]
    assert exit_of("reward", "design", *given) == 2
    assert why in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "minutes", "problem"),
    [
        ("import time; time.sleep(600)", 0.02, "timed out after 0.02 minutes"),
        ("print('embodied: it cannot be'); raise SystemExit(2)", 1.0, "it cannot be"),
        ("import os; os.abort()", 1.0, "the process ended without output"),
    ],
)
def test_a_training_that_fails_is_a_problem_of_its_own(
    tmp_path: Path, line: str, minutes: float, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trials, "command", lambda *_: [sys.executable, "-c", line])
    trials = Trials(tmp_path, [], Budget(minutes=minutes))
    jobs = [Job("a", tmp_path / "p.py", 0, 10)]
    ((job, outcome),) = trials.run(jobs)
    assert job == jobs[0] and outcome.problem == problem and outcome.scores == []
    assert not trials.running


def test_success_is_read_from_evaluations_only(tmp_path: Path) -> None:
    """A program's own numbers, and training's, are not what it is chosen by."""
    lines = [
        {"step": 10, "seconds": 1, "train/success": 1.0, "train/reward": 9.0},
        {"step": 10, "seconds": 1, "eval/success": 0.25, "eval/return": 99.0},
        {"step": 20, "seconds": 2, "eval/success": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert Trials.read(tmp_path).scores == [(10, 0.25), (20, 0.5)]


def test_ten_evenly_spaced_values() -> None:
    lines = [{"step": i} for i in range(1, 26)]
    assert [x["step"] for x in thinned(lines)] == [2, 5, 8, 10, 12, 15, 18, 20, 22, 25]
    assert thinned(lines[:3]) == lines[:3]
