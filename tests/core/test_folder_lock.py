"""The lock on a run's folder: all commands that write there, a holder that lives, and one that was
killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embodied.core import atomic_write, checkpoint
from embodied.core.atomic_write import LOCK, locked
from embodied.core.build import ConfigError
from embodied.core.errors import ContractWarning
from embodied.study.study import command as study_command
from tests.builders import ROOT, exit_of, node_of, run_folder, wait_until

WORDS = ["env=two_gap", "policy=gaussian", "learner=sac", "size=debug"]
STUDY = "metric: eval/return\nseeds: [0]\n"
STUDY += "variants: {only: env=two_gap policy=gaussian learner=sac}\n"


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line with which a command is refused."""
    capsys.readouterr()
    assert exit_of(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("verb", ["train", "collect", "study", "sweep", "improve"])
def test_no_command_writes_where_another_does(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "it.yaml").write_text(STUDY)
    env, policy = node_of("envs.toy.two_gap.TwoGap"), node_of("policies.gaussian.Gaussian")
    run_folder(tmp_path / "run", env, policy, (1,))
    words: dict[str, list[object]] = {
        "train": ["train", *WORDS],
        "collect": ["demos", "collect", "env=two_gap", "episodes=1"],
        "study": ["study", tmp_path / "it.yaml"],
        "sweep": ["sweep", *WORDS, "learner.gamma=0.9..0.99", "trials=1"],
        "improve": ["improve", tmp_path / "run", "env=two_gap"],
    }
    if verb == "sweep":
        pytest.importorskip("optuna")
    with locked(out):
        line = said(capsys, *words[verb], f"out={out}")
        assert f"{out} is being written by process {os.getpid()} on " in line
        assert [file.name for file in out.iterdir()] == [LOCK], "nothing was written"
    assert not out.exists(), "what was made for the lock goes with it"


def test_a_running_training_is_not_joined_and_a_killed_one_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    long = [*WORDS, "steps=1000000", "save_every=200", "eval_every=0", f"out={run}"]
    code = [sys.executable, "-m", "embodied.cli", "train", *long]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(code, env=env, stdout=subprocess.DEVNULL) as first:
        try:
            wait_until(lambda: any(run.glob("checkpoints/0*/loop.pt")), "a checkpoint", tick=0.05)
            line = said(capsys, "resume", run)
            assert f"process {first.pid} on " in line and "embodied" in line
        finally:
            first.send_signal(signal.SIGKILL)
    assert (run / LOCK).exists(), "what a killed process leaves"
    step = int(checkpoint.find(run).name)
    assert exit_of("resume", run, f"steps={step + 200}", "eval_every=0") == 0
    assert int(checkpoint.find(run).name) == step + 200 and not (run / LOCK).exists()


def test_a_study_deletes_nothing_in_which_a_training_of_another_one_runs(tmp_path: Path) -> None:
    out = tmp_path / "only-0"
    with locked(out):
        (out / "metrics.jsonl").touch()
        with pytest.raises(ConfigError, match=f"is being written by process {os.getpid()}"):
            study_command("python -c pass", out)
        assert (out / "metrics.jsonl").exists()
    study_command("python -c pass", out)


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(handle: int, how: int) -> Any:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(atomic_write.fcntl, "flock", flock)
    said = pytest.warns(ContractWarning, match="cannot be locked .*: let no other process")
    with said, locked(tmp_path / "run"):
        pass
