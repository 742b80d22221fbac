"""The wheel works outside of any checkout, in a virtual environment of its own, which sees the
project's other packages through a .pth file behind its own: nothing is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.builders import ROOT, once

PACKAGES = ("configs", "embodied", "envs", "policies", "real_robot")
EXTRA = re.compile(r"embodied-rl\[([\w,]+)\]")


def run(folder: Path, *words: str | Path, fails: bool = False) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([*map(str, words)], cwd=folder, env=env, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    folder = once(tmp_path_factory, "wheel", build)
    return next(folder.glob("*.whl"))


def build(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "*.pyc")
    for package in (*PACKAGES, "benchmarks", "examples"):
        shutil.copytree(ROOT / package, source / package, symlinks=True, ignore=leave)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run(source, *pip, "-w", folder, source)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "installed", partial(install, wheel)) / "env" / "bin" / "python"


def install(wheel: Path, folder: Path) -> None:
    folder = folder / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    made = folder / "bin" / "python"
    site = Path(run(folder, made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (Path(str(site).strip()) / "zz_project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", made, "install", "--no-deps", "--no-index"]
    run(folder, *pip, wheel)


def test_every_file_of_the_packages_is_in_it(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        str("embodied" / file.relative_to(ROOT / "embodied" if package == "embodied" else ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and not file.is_symlink() and file.suffix != ".pyc"
    }
    assert sorted(ours - packed) == []
    assert "embodied/py.typed" in packed
    tops = {name.partition("/")[0] for name in packed}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"embodied"}


@pytest.fixture(scope="module")
def trained(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel has trained a run, `first`."""
    folder = tmp_path_factory.mktemp("trained")
    embodied = python.parent / "embodied"
    run(folder, embodied, "train", "experiment=pendulum_sac", "size=debug", "out=first")
    return folder


def test_it_trains_evaluates_and_exports_a_view(python: Path, trained: Path) -> None:
    run(trained, python.parent / "embodied", "view", "first", "export=first.html")
    assert "<html" in (trained / "first.html").read_text()[:200].lower()
    script = "import embodied as em; print(em.__file__, em.evaluate(em.load('first'), episodes=4))"
    where, _, said = run(trained, python, "-c", script).partition(" ")
    assert Path(where).is_relative_to(python.parent.parent) and "return" in said


def test_the_advice_about_a_missing_extra_installs_it(
    python: Path, trained: Path, tmp_path: Path
) -> None:
    """pip finds the installed distribution itself: in a wheel, and in an editable checkout."""
    (tmp_path / "viser.py").write_text("raise ModuleNotFoundError('no viser', name='viser')\n")
    hidden = "import sys; sys.path.insert(0, '.'); from embodied.cli import main; main()"
    said = run(tmp_path, python, "-c", hidden, "view", trained / "first", fails=True)
    assert len(said.strip().splitlines()) == 1 and (advice := EXTRA.search(said))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--no-index"]
    assert "does not provide the extra" not in run(tmp_path, *pip, advice[0])


def test_extras_in_messages_exist() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    named = {(extra, file) for file in files for extra in EXTRA.findall(file.read_text())}
    every = {(each, file) for extras, file in named for each in extras.split(",")}
    assert [pair for pair in every if pair[0] not in known["optional-dependencies"]] == []
