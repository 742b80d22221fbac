"""Commands in this process, and commands that are interrupted and gone on with."""

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

from embodied.core import checkpoint
from embodied.study import sweep as module
from tests.builders import exit_of, wait_until

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
