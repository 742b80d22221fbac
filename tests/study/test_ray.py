"""`embodied sweep on=ray`, on a cluster of two cores that this file starts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.study import sweep as module
from embodied.study.launchers import launcher
from embodied.study.ray_runner import Runner
from embodied.study.space import Searched
from embodied.study.study import STOPPED
from tests.study.test_sweep import WORDS, embodied
from tests.training.actors.helper import alive

ray: Any = pytest.importorskip("ray")
optuna: Any = pytest.importorskip("optuna")
SPACE = (Searched("learner.gamma", low=0.9, high=0.99),)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_each_trial_runs_on_the_cluster(tmp_path: Path) -> None:
    words = [*WORDS, "learner.gamma=0.9..0.99", "trials=2", "workers=2", f"out={tmp_path / 'out'}"]
    assert embodied("sweep", *words, "on=ray", "ray=cpus=1") == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())["trials"]
    assert [trial["state"] for trial in found] == ["complete"] * 2
    assert "two_gap-gaussian-sac" in (tmp_path / "out" / "trial-000.log").read_text()


def long_trial(out: Path) -> tuple[Any, Any, Any]:
    """A sweep of one long trial, its study and that trial."""
    sweep = module.Sweep(words=tuple(WORDS), space=SPACE, trials=1, steps=400_000, rungs=200)
    study = module.open_study(sweep, out)
    return sweep, study, study.ask()


def test_a_poor_trial_is_interrupted_and_saves(tmp_path: Path) -> None:
    sweep, study, trial = long_trial(tmp_path)
    study.pruner = optuna.pruners.ThresholdPruner(lower=1e9)
    module._run_trial(sweep, study, trial, tmp_path, Event(), launcher("ray", {}))
    assert study.trials[0].state.name == "PRUNED"
    assert 2_000 <= int(checkpoint.find(tmp_path / "trial-000").name) < 400_000


def test_a_training_whose_actor_is_killed_saves_and_counts_as_interrupted(tmp_path: Path) -> None:
    sweep, _, trial = long_trial(tmp_path)
    folder = module.folder_of(tmp_path, trial.number)
    training: Any = launcher("ray", {}).start(module.line_of(sweep, trial, tmp_path), folder)
    end = time.monotonic() + 120
    while not list(folder.glob("checkpoints/0*/loop.pt")) and time.monotonic() < end:
        assert training.poll() is None
        time.sleep(0.1)
    pid = ray.get(training.runner.__ray_call__.remote(lambda runner: runner.process.pid))
    ray.kill(training.runner)
    assert training.wait(60) == STOPPED
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(pid), "the training ends with its actor"
    assert "stopped; saved" in Path(f"{folder}.log").read_text()


def test_what_is_interrupted_before_it_begins_does_not_run(tmp_path: Path) -> None:
    runner = Runner()
    runner.interrupt()
    assert runner.run(["false"], str(tmp_path / "log"), str(tmp_path)) is None
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("on", "options", "said"),
    [
        ("ray", {"ray": "cores=2"}, "cpus=2 gpus=1"),
        ("ray", {"ray": "cpus=two"}, "cpus=2 gpus=1"),
        ("ray", {"slurm": "--time=1"}, "slurm= has an effect with on=slurm only"),
        ("here", {"ray": "cpus=1"}, "ray= has an effect with on=ray only"),
        ("cloud", {}, "on=cloud should be here, slurm or ray"),
    ],
)
def test_bad_settings_are_one_line(on: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launcher(on, options)
