"""docs/extending.md and docs/extending_more.md do what they say, in one folder of their own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from string import Template

import pytest

from embodied.commands import new
from embodied.commands.new import KINDS
from tests.builders import python, shell, write_files
from tests.docs.run import Page

PAGE = Path("docs/extending.md").read_text() + Path("docs/extending_more.md").read_text()
FILES = dict(re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE, re.DOTALL))
TEMPLATES = Path(new.__file__).with_name("templates")
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


def scores(run_folder: Path) -> list[float]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line["eval/return"] for line in lines if "eval/return" in line]


def test_the_page_runs(tmp_path: Path) -> None:
    assert len(FILES) == 14
    write_files(tmp_path, FILES)
    commands = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    assert len(commands) == 2
    page = Page(tmp_path)
    for line in "".join(commands).replace("\\\n", "").splitlines():
        page.as_written(line)
    own = '--config-dir my_configs "allow=[my_lab]"'
    for part in ("env plane", "policy linear env=plane", "learner rwr policy=linear env=plane"):
        assert "sound" in page.as_written(f"embodied check {part} {own}")
    # A point that never moves stays about 0.77 away for 20 steps: -15. The example learns to go.
    assert scores(tmp_path / "outputs/plane")[-1] > -7
    assert scores(tmp_path / "outputs/plane_gain")[-1] > -7


def test_the_first_methods_of_a_kind_have_their_protocols(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    done = python("-c", PROTOCOLS, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_part_works_at_once(kind: str, tmp_path: Path) -> None:
    said = shell(
        tmp_path,
        f"embodied new {kind} my_{kind}; {sys.executable} -m pytest -q tests/test_my_{kind}.py",
    )
    assert "1 passed" in said
    again = python("-m", "embodied", "new", kind, f"my_{kind}", folder=tmp_path)
    assert again.returncode == 2 and "exists; choose another name" in again.stderr


def test_the_page_shows_what_new_writes() -> None:
    for kind, name, called in (
        ("env", "plane", "Plane"),
        ("policy", "linear", "Linear"),
        ("learner", "rwr", "RewardWeightedRegression"),
    ):
        text = Template((TEMPLATES / f"{kind}.txt").read_text())
        assert text.substitute(name=name, Name=called) == FILES[f"my_lab/{name}.py"]
