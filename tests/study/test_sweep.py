"""`embodied sweep`: Optuna's trials as trainings, pruned at checkpoints, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.study.sweep import Here, Searched, searched
from tests.builders import exit_of
from tests.study.helper import WORDS, Interrupted, pruned, trials_of
from tests.tiers import only_all


@pytest.mark.parametrize(
    ("word", "means"),
    [
        ("learner.lr=log:1e-4..1e-3", Searched("learner.lr", low=1e-4, high=1e-3, log=True)),
        ("a=0.1..0.9", Searched("a", low=0.1, high=0.9)),
        ("a=16..64", Searched("a", low=16, high=64, whole=True)),
        ("a=log:16..64", Searched("a", low=16, high=64, whole=True, log=True)),
        ("a=int:1e1..1e2", Searched("a", low=10, high=100, whole=True)),
        ("a=choice:[8],[16,16]", Searched("a", ("[8]", "[16,16]"))),
        ("a=choice:relu,tanh", Searched("a", ("relu", "tanh"))),
        ("a=3", None),
        ("init=../run", None),
        ("demos=/x/..y", None),
    ],
)
def test_what_is_searched(word: str, means: Searched | None) -> None:
    assert searched(word) == means


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("a=log:0..1", "0 < LOW < HIGH"),
        ("a=3..3", "LOW < HIGH"),
        ("a=log:x..y", "a=log:LOW..HIGH"),
        ("a=choice:b", "at least two values"),
    ],
)
def test_a_wrong_range(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        searched(word)


def test_trials_to_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    out = tmp_path / "sweep"
    space = ["learner.critic_lr=log:1e-4..1e-2", "policy.hidden=choice:[8],[16,16]"]
    words = ["sweep", *WORDS, *space, f"out={out}", "workers=2"]
    assert exit_of(*words, "trials=2") == 0
    assert "best: trial" in capsys.readouterr().out
    found = json.loads((out / "results.json").read_text())
    states = [trial["state"] for trial in found["trials"]]
    assert len(states) == 2 and set(states) <= {"complete", "pruned"} and "complete" in states
    for trial in found["trials"]:
        run = (Path(trial["run"]) / "run.yaml").read_text()
        assert str(trial["settings"]["learner.critic_lr"]) in run
    assert found["best"]["state"] == "complete"
    page = (out / "report.html").read_text()
    assert "Best: trial" in page and "policy.hidden" in page and "<svg" in page
    assert exit_of(*words, "trials=3") == 0  # goes on: one more
    assert capsys.readouterr().out.count("embodied train") == 1
    assert exit_of(*words, "learner.gamma=0.9", "trials=3") == 2
    assert "holds a sweep of other settings" in capsys.readouterr().err


def test_a_poor_trial_stops_at_a_checkpoint_and_can_be_resumed(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    assert list(pruned(tmp_path, Here()).intermediate_values) == [2_000]
    steps = int(checkpoint.find(tmp_path / "trial-000").name) + 100
    assert exit_of("resume", tmp_path / "trial-000", f"steps={steps}") == 0
    assert int(checkpoint.find(tmp_path / "trial-000").name) >= steps


@only_all  # as a study: test_study.py
def test_a_sweep_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """The same command finishes the same trial."""
    pytest.importorskip("optuna")
    words = ["sweep", *WORDS, "learner.gamma=0.9..0.99", "trials=1", "steps=3000", "rungs=6"]
    sweep = Interrupted(tmp_path, "out/trial-000", *words, "out=out", "workers=1")
    assert "resume=out/trial-000" in sweep.again()
    (trial,) = trials_of(tmp_path / "out")
    assert len(trial["checkpoints"]) == 5, "all of its evaluations were reported once"
