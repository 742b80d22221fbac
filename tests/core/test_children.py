"""Child processes and the current folder: a file that lies there is imported last, or never."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from embodied.core.children import import_from_here
from tests.builders import ROOT, python

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


def test_the_current_folder_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    started = [
        f"{file.relative_to(ROOT)}: {found[0]}"
        for top in ("embodied", "envs", "policies", "real_robot")
        for file in (ROOT / top).rglob("*.py")
        for found in re.finditer(r'executable, "-m"', file.read_text())
    ]
    assert started == []


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
