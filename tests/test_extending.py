"""docs/extending.md and docs/extending_more.md do what they say, in one folder of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path("docs/extending.md").read_text() + Path("docs/extending_more.md").read_text()
FILES = re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE, re.DOTALL)
PROTOCOLS = """
from embodied.core.policy import PolicyWrapper
from embodied.learners.learner import TakesDemonstrations
from embodied.teachers.teacher import TwoAgentTeacher
from my_lab.gain import Gain
from my_lab.ppo_bc import PpoBc
from my_lab.scout import Scout

def has(cls, protocol):
    return all(hasattr(cls, name) for name in vars(protocol) if not name.startswith("_"))

assert issubclass(Gain, PolicyWrapper)
assert has(PpoBc, TakesDemonstrations)
assert issubclass(Scout, TwoAgentTeacher)
"""


def write_files(folder: Path) -> None:
    for name, text in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def run(folder: Path, *words: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def scores(run_folder: Path) -> list[float]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line["eval/return"] for line in lines if "eval/return" in line]


def test_the_page_runs(tmp_path: Path) -> None:
    assert len(FILES) == 14
    write_files(tmp_path)
    commands = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    assert len(commands) == 2
    run(tmp_path, "bash", "-c", "set -e\n" + "".join(commands))
    # A point that never moves stays about 0.77 away for 20 steps: -15. The example learns to go.
    assert scores(tmp_path / "outputs/plane")[-1] > -7
    assert scores(tmp_path / "outputs/plane_gain")[-1] > -7


def test_the_first_methods_of_a_kind_have_their_protocols(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "protocols.py").write_text(PROTOCOLS)
    run(tmp_path, sys.executable, "protocols.py")
