"""Guides do what they say, in a folder of their own: their files, their commands as written, and
the tutorials as the notebooks that the site offers."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from string import Template

import pytest

from embodied.commands import new
from embodied.commands.new import KINDS
from tests.builders import ROOT, python, shell, write_files
from tests.docs.blocks import Step, steps
from tests.docs.run import Page
from tests.tiers import only_all, usually

DOCS = ROOT / "docs"


def steps_of(*pages: str) -> list[Step]:
    return [step for page in pages for step in steps((DOCS / page).read_text())]


def files_in(found: list[Step]) -> dict[str, str]:
    return {step.name: step.text for step in found if step.kind == "file"}


def commands_in(found: list[Step]) -> list[str]:
    return [step.text for step in found if step.kind == "command"]


EXTENDING = steps_of("extending.md", "extending_more.md")
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


def test_the_examples_of_extending_are_sound_and_learn(tmp_path: Path) -> None:
    write_files(tmp_path, files_in(EXTENDING))
    done = python("-c", PROTOCOLS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    page = Page(tmp_path)
    for line in commands_in(EXTENDING):
        page.as_written(line)
    own = '--config-dir my_configs "allow=[my_lab]"'
    for part in ("env plane", "policy linear env=plane", "learner rwr policy=linear env=plane"):
        assert "sound" in page.as_written(f"embodied check {part} {own}")
    # A point that never moves stays about 0.77 away for 20 steps: -15. The example learns to go.
    for run in ("plane", "plane_gain"):
        assert scores(tmp_path / "outputs" / run)[-1] > -7


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_part_works_at_once(kind: str, tmp_path: Path) -> None:
    pytest_words = f"{sys.executable} -m pytest -q tests/test_my_{kind}.py"
    assert "1 passed" in shell(tmp_path, f"embodied new {kind} my_{kind}; {pytest_words}")
    again = python("-m", "embodied", "new", kind, f"my_{kind}", folder=tmp_path)
    assert again.returncode == 2 and "exists; choose another name" in again.stderr


def test_the_page_shows_what_new_writes() -> None:
    for kind, name, called in (
        ("env", "plane", "Plane"),
        ("policy", "linear", "Linear"),
        ("learner", "rwr", "RewardWeightedRegression"),
    ):
        text = Template((TEMPLATES / f"{kind}.txt").read_text())
        shown = files_in(EXTENDING)[f"my_lab/{name}.py"]
        assert text.substitute(name=name, Name=called) == shown


OWN_ROBOT = steps_of("own_robot.md")
DESCRIBE, SIMULATED, DRY, FIRST, *_ = commands_in(OWN_ROBOT)
PATIENTLY = '"robot.fresh={hold: 1.0, stop: 10.0, state: 5.0}"'  # on a busy machine


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after the page's first command, without capsules: tests/real_robot/
    test_describe.py fits some."""
    folder = tmp_path_factory.mktemp("own")
    tern = (DOCS / "own_robot" / "tern.urdf").read_text()
    write_files(folder, {**files_in(OWN_ROBOT), "my_arm.urdf": tern})
    said = shell(folder, f"{DESCRIBE} capsules=false")
    assert "6 joints from base_link to tool" in said and "mine/robot/my_arm.yaml" in said
    return folder


@only_all  # its parts: tests/real_robot/test_describe.py, test_deploy.py
def test_an_own_robot_is_described_simulated_and_driven(described: Path) -> None:
    for number, deploy in enumerate((SIMULATED, DRY, FIRST)):
        folder = described / f"d{number}"
        folder.mkdir(mode=0o700)
        said = shell(described, f"{deploy} {PATIENTLY} folder={folder}")
        assert deploy == DRY or "success  1 of 1" in said
    summary = json.loads((described / "outputs" / "first" / "summary.json").read_text())
    assert summary["episodes"][0]["recorded"] and summary["problem"] == ""


def test_a_driver_that_is_not_allowed_is_refused(described: Path) -> None:
    dry = DRY.replace('"allow=[my_lab]" ', "").replace("outputs/dry", "outputs/no")
    with pytest.raises(AssertionError, match=r'allow=\["my_lab"\]'):
        shell(described, dry)


DEBUG = 'size="debug", '
# Of each tutorial: the text that asks for many steps, and what is run instead.
NOTEBOOKS = {
    "fine_tune": {
        '"experiment=two_gap_flow", ': f'"experiment=two_gap_flow", {DEBUG}',
        '"experiment=two_gap_reinflow", ': f'"experiment=two_gap_reinflow", {DEBUG}',
        "episodes=100": "episodes=8",
        "episodes=200": "episodes=10",
    },
    "own_environment": {
        "    steps=8_000,": f"    {DEBUG}",
        "steps=8_000, ": DEBUG,
        "episodes=100": "episodes=10",
    },
    "dataset_to_robot": {
        "steps=1500": "steps=40, eval_every=20",
        "episodes=100)": "episodes=10)",
        "episodes=100,": "episodes=8,",
        "episodes=3": "episodes=1 seconds=2",
    },
}


# One with `%%writefile` cells stands for all: test_run.py runs the blocks of the others' pages.
@pytest.mark.parametrize("page", usually(["own_environment"], NOTEBOOKS))
def test_a_notebook_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jupytext = pytest.importorskip("jupytext", reason="pip install -e '.[docs]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[docs]'")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name, value in {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    text = (DOCS / "tutorials" / f"{page}.md").read_text()
    for long, short in NOTEBOOKS[page].items():
        assert long in text, f"{page}.md has no {long!r} any more"
        text = text.replace(long, short)
    notebook = jupytext.reads(text, fmt="md")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert re.search(r"success \d+%", said)
    assert list(tmp_path.glob("outputs/**/policy.safetensors"))
