"""The user's current folder: last on sys.path; a module in it with the name of ours is named."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from embodied.user_packages import ROOT, ShadowWarning, import_from_here

TRAIN = "from embodied.cli import main; main(['train', 'experiment=cartpole_ppo', 'size=debug'])"


def python(folder: Path, code: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run `code` in `folder`, with `first` before our packages on the path."""
    path = f"{first}:{ROOT}" if first else str(ROOT)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def package(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    return folder / name


def test_the_current_folder_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    import_from_here()
    assert sys.path[-1] == str(tmp_path) and sys.path[0] != str(tmp_path)


def test_folders_of_the_user_break_nothing(tmp_path: Path) -> None:
    """`envs` and `policies` of the user are not imported, which one line each says."""
    for name in ("envs", "policies"):
        package(tmp_path, name)
    done = python(tmp_path, TRAIN)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "is not imported" in line]
    assert len(lines) == 2 and str(tmp_path / "envs") in lines[0]


def test_what_hides_ours_is_named(tmp_path: Path) -> None:
    package(tmp_path, "real_robot")
    code = "from embodied.user_packages import import_from_here; import_from_here()"
    done = python(tmp_path, code, first=str(tmp_path))
    assert "hides embodied's own package real_robot" in done.stderr


def test_folders_without_modules_are_not_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("a: 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShadowWarning)
        import_from_here()
