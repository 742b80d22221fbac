"""`embodied sweep on=ray`, on a cluster of two cores that this file starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from embodied.core.build import ConfigError
from embodied.study import sweep as module
from embodied.study.study import STOPPED
from embodied.study.sweep import Runner, launcher
from tests.builders import Capture, Patch, exit_of, wait_until
from tests.study.test_sweep import WORDS, Interrupted, one_trial, pruned, trials_of
from tests.tiers import only_all
from tests.training.actors.helper import alive, left_of

ray: Any = pytest.importorskip("ray")
optuna: Any = pytest.importorskip("optuna")
LONG = (400_000, 200)  # steps and rungs


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@only_all  # on Slurm too
def test_a_trial_runs_on_the_cluster(tmp_path: Path) -> None:
    words = [*WORDS, "learner.gamma=0.9..0.99", "trials=1", "workers=1", f"out={tmp_path / 'out'}"]
    assert exit_of("sweep", *words, "on=ray", "threads=1") == 0
    assert len(trials_of(tmp_path / "out")) == 1
    assert "two_gap-gaussian-sac" in (tmp_path / "out" / "trial-000.log").read_text()
    assert ray.is_initialized(), "a cluster that was there stays"


@only_all  # on Slurm too
def test_a_poor_trial_is_interrupted_and_saves(tmp_path: Path) -> None:
    pruned(tmp_path, launcher("ray", None), *LONG)


@only_all
def test_a_training_whose_actor_is_killed_saves_and_counts_as_interrupted(
    tmp_path: Path, capsys: Capture
) -> None:
    sweep, _, trial = one_trial(tmp_path, *LONG)
    folder = module.folder_of(tmp_path, trial.number)
    training: Any = launcher("ray", None).start(module.line_of(sweep, trial, tmp_path), folder)
    saved = "checkpoints/0*/loop.pt"
    wait_until(lambda: training.poll() is not None or any(folder.glob(saved)))
    assert training.poll() is None
    pids = training.runner.__ray_call__.remote(lambda runner: (os.getpid(), runner.process.pid))
    actor, pid = ray.get(pids)
    os.kill(actor, signal.SIGKILL)
    assert training.wait(600) == STOPPED
    assert "trial-000 ended with its machine" in capsys.readouterr().err
    wait_until(lambda: not alive(pid), "the training ends with its actor")
    assert "stopped; saved" in Path(f"{folder}.log").read_text()


def test_what_waits_for_a_machine_ends_at_once(tmp_path: Path) -> None:
    other = ray.remote(Runner).options(num_cpus=2).remote()
    ray.get(other.__ray_ready__.remote())
    on = launcher("ray", None)
    training = on.start(["python", "-c", "1"], tmp_path / "waits")
    with pytest.raises(subprocess.TimeoutExpired):
        training.wait(0.5)
    on.interrupt(training, tmp_path / "waits")
    assert training.wait(10) == STOPPED
    ray.kill(other)


def test_what_is_interrupted_just_before_it_begins_hears_it(tmp_path: Path) -> None:
    runner = Runner()
    runner.interrupt()
    (tmp_path / "it.ray").write_text("mark")
    words = ["python", "-c", "import time; time.sleep(60)"]
    assert runner.run(words, str(tmp_path / "it"), str(tmp_path), "mark") != 0


@pytest.mark.parametrize("content", [None, "of an earlier sweep"])
def test_a_folder_that_is_not_shared_is_one_line(
    tmp_path: Path, content: str | None, monkeypatch: Patch
) -> None:
    """The runner as on a machine on which the folder is another one, or not there."""
    monkeypatch.setattr(module, "SHARED", 0.2)
    if content is not None:
        (tmp_path / "it.ray").write_text(content)
    said = Runner().run(["python", "-c", "1"], str(tmp_path / "it"), str(tmp_path), "mark")
    assert "it.ray of the sweep's machine is not here" in str(said) and "share" in str(said)


def test_why_a_training_could_not_begin_ends_the_sweep(tmp_path: Path, monkeypatch: Patch) -> None:
    sweep, study, trial = one_trial(tmp_path / "out", *LONG)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "not_there"))
    with pytest.raises(ConfigError, match=r"No such file or directory.*not_there"):
        module._run_trial(sweep, study, trial, tmp_path / "out", Event(), launcher("ray", None))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["threads=3"], "needs 3 cores and 0 GPUs on one machine.* at most 2 cores and 0 GPUs"),
        (["device=cuda"], "needs 1 cores and 1 GPUs on one machine"),
        (["slurm=--time=1"], "slurm= has an effect with on=slurm only"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: Capture
) -> None:
    every = [*WORDS, "learner.gamma=0.9..0.99", *words, f"out={tmp_path / 'out'}", "on=ray"]
    assert exit_of("sweep", *every) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_one_line(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'on=ray needs Ray: pip install "embodied-rl\[ray\]"'):
        launcher("ray", None)


@only_all  # on Slurm too
def test_an_interrupted_sweep_ends_its_cluster_and_goes_on(tmp_path: Path) -> None:
    """Without RAY_ADDRESS the sweep starts a cluster."""
    words = ["sweep", *WORDS, "learner.gamma=0.9..0.99", "trials=1", "steps=4000", "rungs=8"]
    sweep = Interrupted(tmp_path, "out/trial-000", *words, "out=out", "on=ray")
    assert "stopped; saved" in (tmp_path / "out" / "trial-000.log").read_text()
    assert not left_of(sweep.pid)
    assert "resume=" in sweep.again()
    assert len(trials_of(tmp_path / "out")) == 1
