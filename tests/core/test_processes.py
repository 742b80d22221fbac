"""Processes: what they import (a file in the current folder last, or never), the lock on a run's
folder, the packages that a run was allowed to use."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied.core import atomic_write, build, checkpoint, run_packages
from embodied.core.atomic_write import LOCK, locked
from embodied.core.build import ConfigError
from embodied.core.children import import_from_here
from embodied.core.errors import ContractWarning
from embodied.study.study import command as study_command
from tests.builders import ROOT, Capture, Patch, exit_of, node_of, python, run_folder, wait_until

TRAIN = """
import sys
from embodied.cli import main
for experiment in ("cartpole_ppo", "pendulum_sac"):
    try:
        main(["train", f"experiment={experiment}", "size=debug", "video=false"])
    except SystemExit as stop:
        assert not stop.code, stop.code
# The compiler takes 1.5 to 2 s and 70 MB in every process.
assert "torch._dynamo" not in sys.modules
"""


def test_the_current_folder_comes_last(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    import_from_here()
    assert sys.path[-1] == str(tmp_path) and sys.path[0] != str(tmp_path)


def test_packages_of_the_users_own_repository(tmp_path: Path) -> None:
    """A script in a folder with `envs`, `policies` and `configs` imports those, and ours work; a
    run does not import torch's compiler."""
    for name in ("envs", "policies", "configs", "real_robot"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "script.py").write_text(
        "import envs, policies, configs, real_robot\n"
        "from embodied.envs.toy.two_gap import TwoGap\n"
        "assert envs.MINE and policies.MINE and configs.MINE and real_robot.MINE\n"
        f"{TRAIN}"
    )
    done = python("script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "code",
    [
        "from embodied.sandbox.gate import Template; Template().close()",
        "from embodied.envs.workers import Worker; w = Worker('a', dict, ()); w.send('keys'); "
        "w.receive(); w.close()",
        "from embodied.study.study import program; import subprocess; "
        "subprocess.run(program(['embodied', '--version']), check=True)",
    ],
    ids=["sandbox", "worker", "study"],
)
def test_a_child_runs_no_file_of_the_current_folder(tmp_path: Path, code: str) -> None:
    (tmp_path / "json.py").write_text("open('ran', 'w')\nraise ImportError('this is no json')\n")
    done = python("-P", "-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_every_module_is_started_by_module_command() -> None:
    files = (ROOT / "embodied").rglob("*.py")
    assert [file for file in files if 'executable, "-m"' in file.read_text()] == []


PARENT = """
import subprocess, sys, threading, time
from embodied.core.children import interrupt_with_parent

def start():
    words, pipe = [sys.executable, "-c", sys.argv[1]], subprocess.PIPE
    child = subprocess.Popen(words, stdout=pipe, preexec_fn=interrupt_with_parent)
    child.stdout.readline()  # it trains

thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(1)  # longer than a signal of the same moment
"""
CHILD = """
import os, sys, time
from embodied.training.trainer import Trainer
parent = os.getppid()
with Trainer(None, 1, None, None, None) as trainer:
    print("trains", flush=True)
    while os.getppid() == parent:
        time.sleep(0.05)
    time.sleep(0.2)
print("saved" if trainer.interrupted else "heard nothing", file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is told on Linux only")
def test_a_parent_that_dies_thread_by_thread_interrupts_a_training_once() -> None:
    done = python("-c", PARENT, CHILD)
    assert done.stderr.split() == ["saved"], done.stderr


WORDS = ["env=two_gap", "policy=gaussian", "learner=sac", "size=debug"]
STUDY = "metric: eval/return\nseeds: [0]\n"
STUDY += "variants: {only: env=two_gap policy=gaussian learner=sac}\n"


def said(capsys: Capture, *words: object) -> str:
    """The one line with which a command is refused."""
    capsys.readouterr()
    assert exit_of(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("verb", ["train", "collect", "study", "sweep", "improve"])
def test_no_command_writes_where_another_does(verb: str, tmp_path: Path, capsys: Capture) -> None:
    out, study, run = (tmp_path / name for name in ("out", "it.yaml", "run"))
    study.write_text(STUDY)
    run_folder(run, node_of("envs.toy.two_gap.TwoGap"), node_of("policies.gaussian.Gaussian"), (1,))
    words: dict[str, list[object]] = {
        "train": ["train", *WORDS],
        "collect": ["demos", "collect", "env=two_gap", "episodes=1"],
        "study": ["study", study],
        "sweep": ["sweep", *WORDS, "learner.gamma=0.9..0.99", "trials=1"],
        "improve": ["improve", run, "env=two_gap"],
    }
    if verb == "sweep":
        pytest.importorskip("optuna")
    with locked(out):
        line = said(capsys, *words[verb], f"out={out}")
        assert f"{out} is being written by process {os.getpid()} on " in line
        assert [file.name for file in out.iterdir()] == [LOCK], "nothing was written"
    assert not out.exists(), "what was made for the lock goes with it"


def test_a_running_training_is_not_joined_and_a_killed_one_is_gone_on_with(
    tmp_path: Path, capsys: Capture
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
            study_command("python -c pass", out, "pass")
        assert (out / "metrics.jsonl").exists()
    study_command("python -c pass", out, "pass")


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: Patch) -> None:
    def flock(handle: int, how: int) -> Any:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(atomic_write.fcntl, "flock", flock)
    said = pytest.warns(ContractWarning, match="cannot be locked .*: let no other process")
    with said, locked(tmp_path / "run"):
        pass


SHORT = ("train", "env=two_gap", "learner=sac", "size=debug", "video=false", "steps=40")
LAB = """
from dataclasses import dataclass
from embodied.policies import gaussian

@dataclass(frozen=True)
class Config(gaussian.Config):
    hidden: tuple[int, ...] = (8,)

class Mine(gaussian.Gaussian):
    def __init__(self, config: Config, spec) -> None:
        super().__init__(config, spec)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a package of their own, and a run that was trained with it."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "remembered_lab.py").write_text(LAB)
    (folder / "yaml" / "policy").mkdir(parents=True)
    (folder / "yaml" / "policy" / "mine.yaml").write_text("_target_: remembered_lab.Mine\n")
    before = [*build.ALLOWED], [*build.ASKED]  # conftest gives back what a test changes, not this
    words = [*SHORT, "policy=mine", "out=run", "allow=[remembered_lab]"]
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, patch)
        assert exit_of(*words, "--config-dir", "yaml") == 0
        assert list(json.loads(run_packages.state_file().read_text())) == [str(folder / "run")]
    build.ALLOWED[:], build.ASKED[:] = before
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """The same elsewhere, remembered as training does."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("state"))
    enter(tmp_path, monkeypatch)
    build.allow("remembered_lab")
    run_packages.remember(tmp_path / "run")
    forget()
    return tmp_path


def enter(folder: Path, patch: Patch) -> None:
    patch.chdir(folder)
    patch.setattr(sys, "path", [*sys.path])
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    forget()  # what modules of other tests allowed


def forget() -> None:
    """As in a new process: nothing is allowed."""
    build.ALLOWED[:] = [each for each in build.ALLOWED if each not in build.ASKED]
    build.ASKED.clear()


def test_the_owner_need_not_say_it_again(place: Path, capsys: Capture) -> None:
    assert exit_of("eval", "run", "episodes=2") == 0
    assert "embodied: allow=[remembered_lab], as when it was trained" in capsys.readouterr().err
    forget()
    assert exit_of("train", "resume=run", "steps=60") == 0
    forget()
    assert exit_of("eval", "run", "episodes=2") == 0  # its run.yaml has changed since


@pytest.mark.parametrize("how", ["moved", "changed", "said in the file", "beside it", "damaged"])
def test_a_run_cannot_extend_the_list(place: Path, how: str, capsys: Capture) -> None:
    """A folder from somebody else: no entry, another run.yaml, or a list of its own; beside one of
    the user's; or what was remembered cannot be read."""
    run, theirs = place / "run", place / "theirs"
    runs = [run]
    if how in ("moved", "beside it"):
        shutil.copytree(run, theirs)
        runs = [theirs] if how == "moved" else [run, theirs]
    elif how == "damaged":
        run_packages.state_file().write_text("{")
    else:
        node = yaml.safe_load((run / "run.yaml").read_text())
        node |= {"seed": 7} if how == "changed" else {"allow": ["remembered_lab"]}
        (run / "run.yaml").write_text(yaml.safe_dump(node))
    assert exit_of("eval", *runs, "episodes=2") == 2
    assert "add its package with allow=" in capsys.readouterr().err


def test_what_is_remembered(place: Path) -> None:
    """Not what reaches robots, and nothing of a run without packages of its own."""
    file = run_packages.state_file()
    before = file.read_text()
    assert list(json.loads(before)) == [str(place / "run")]
    assert run_packages.recall(["a" * 5000]) == [], "a word too long for a path names no run"
    assert exit_of(*SHORT, "policy=gaussian", "out=plain") == 0
    assert file.read_text() == before
    build.allow("embodied.real_robot")
    build.allow("remembered_lab")
    run_packages.remember(place / "run")
    (entry,) = json.loads(file.read_text()).values()
    assert entry["packages"] == ["remembered_lab"]
