"""Packages that a run was allowed to use: remembered by the user's account, never by the run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from embodied.core import build, run_packages
from tests.builders import exit_of

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
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same elsewhere, remembered as training does."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("state"))
    enter(tmp_path, monkeypatch)
    build.allow("remembered_lab")
    run_packages.remember(tmp_path / "run")
    forget()
    return tmp_path


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(folder)
    patch.setattr(sys, "path", [*sys.path])
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    forget()  # what modules of other tests allowed


def forget() -> None:
    """As in a new process: nothing is allowed."""
    build.ALLOWED[:] = [each for each in build.ALLOWED if each not in build.ASKED]
    build.ASKED.clear()


def test_the_owner_need_not_say_it_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("eval", "run", "episodes=2") == 0
    assert "embodied: allow=[remembered_lab], as when it was trained" in capsys.readouterr().err
    forget()
    assert exit_of("train", "resume=run", "steps=60") == 0
    forget()
    assert exit_of("eval", "run", "episodes=2") == 0  # its run.yaml has changed since


@pytest.mark.parametrize("how", ["moved", "changed", "said in the file"])
def test_a_run_cannot_extend_the_list(
    place: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder from somebody else: no entry, another run.yaml, or a list of its own."""
    run = place / "run"
    if how == "moved":
        shutil.copytree(run, place / "theirs")
        run = place / "theirs"
    else:
        node = yaml.safe_load((run / "run.yaml").read_text())
        node |= {"seed": 7} if how == "changed" else {"allow": ["remembered_lab"]}
        (run / "run.yaml").write_text(yaml.safe_dump(node))
    assert exit_of("eval", run, "episodes=2") == 2
    assert "add its package with allow=" in capsys.readouterr().err


def test_another_run_beside_it_gains_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "run", place / "theirs")
    assert exit_of("eval", "run", "theirs", "episodes=2") == 2
    assert "add its package with allow=" in capsys.readouterr().err


def test_what_reaches_robots_is_not_remembered(place: Path) -> None:
    build.allow("embodied.real_robot")
    build.allow("remembered_lab")
    run_packages.remember(place / "run")
    (entry,) = json.loads(run_packages.state_file().read_text()).values()
    assert entry["packages"] == ["remembered_lab"]


def test_nothing_is_written_without_packages(place: Path) -> None:
    before = run_packages.state_file().read_text()
    assert list(json.loads(before)) == [str(place / "run")]
    assert exit_of(*SHORT, "policy=gaussian", "out=plain") == 0
    assert run_packages.state_file().read_text() == before


def test_a_damaged_file_is_ignored(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_packages.state_file().write_text("{")
    assert exit_of("eval", "run", "episodes=2") == 2
    assert "allow=" in capsys.readouterr().err


def test_a_word_too_long_for_a_path_names_no_run(place: Path) -> None:
    assert json.loads(run_packages.state_file().read_text()), "a run is remembered"
    assert run_packages.recall(["a" * 5000]) == []
