"""`embodied sweep`: Optuna's trials as trainings, pruned at checkpoints, and gone on with."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.study import sweep as module
from embodied.study.sweep import Here, Searched, searched
from tests.builders import exit_of, wait_until
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
    for other in ("learner.gamma=0.9", "direction=minimize"):
        assert exit_of(*words, other, "trials=3") == 2
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


WORDS = ["env=two_gap", "policy=gaussian", "learner=sac", "size=debug"]


class Interrupted:
    """A command that gets SIGINT with all of its processes, as a terminal sends it, when there is a
    first checkpoint in `run`. It has ended as interrupted; `err` is what it said."""

    def __init__(self, folder: Path, run: str, *words: str) -> None:
        self.folder, self.words = folder, words
        path = f"{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}"
        process = subprocess.Popen(
            [sys.executable, "-m", "embodied.cli", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.pid = process.pid
        wait_until(lambda: any(folder.glob(f"{run}/checkpoints/0*")), run, tick=0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, self.err = process.communicate(timeout=600)
        assert process.returncode == 130, self.err

    def again(self) -> str:
        """What the same command prints, in this process: it goes on and succeeds."""
        shown = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(shown):
            assert exit_of(*self.words) == 0
        return shown.getvalue()


def trials_of(out: Path) -> list[dict[str, Any]]:
    """The trials of a sweep that completed all of them."""
    found = json.loads((out / "results.json").read_text())["trials"]
    assert {trial["state"] for trial in found} == {"complete"}
    return found


def one_trial(out: Path, steps: int = 40_000, rungs: int = 20) -> tuple[Any, Any, Any]:
    """A sweep of one long trial, its study and that trial."""
    space = (module.Searched("learner.gamma", low=0.9, high=0.99),)
    sweep = module.Sweep(words=tuple(WORDS), space=space, trials=1, steps=steps, rungs=rungs)
    study = module.open_study(sweep, out)
    return sweep, study, study.ask()


def pruned(out: Path, launcher: module.Here, steps: int = 40_000, rungs: int = 20) -> Any:
    """The trial of a sweep whose pruner stops whatever it sees: it was saved where it was."""
    import optuna

    sweep, study, trial = one_trial(out, steps, rungs)
    study.pruner = optuna.pruners.ThresholdPruner(lower=1e9)
    module._run_trial(sweep, study, trial, out, Event(), launcher)
    (found,) = study.trials
    assert found.state.name == "PRUNED"
    assert 2_000 <= int(checkpoint.find(out / "trial-000").name) < steps
    return found
