"""Commands of benchmarks: settings are words, and child processes find the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.command import ROOT, put_root_on_path, settings
from embodied.core.build import ConfigError

MEASUREMENTS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef run(" in path.read_text()
)


def measure(out: Path) -> None:
    """A measurement on one device."""


def measure_on(out: Path, device: str) -> None:
    """A measurement on any device."""


def test_settings_are_words() -> None:
    assert settings(measure, []) == {"out": Path("outputs/bench")}
    assert settings(measure, ["out=here"]) == {"out": Path("here")}
    found = settings(measure_on, ["device=cpu"])
    assert str(found["device"]) == "cpu"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ot=x"], "is not a setting of a benchmark"),
        (["--fast"], "is not a setting of a benchmark"),
        (["out="], "is not a setting of a benchmark"),
        (["device=cpu"], "one device only"),
    ],
)
def test_other_words_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(measure, words)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_is_a_command(name: str) -> None:
    """The file ends in its own call: `python -m benchmarks.NAME` measures."""
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    assert text.endswith('if __name__ == "__main__":\n    main(run)\n')


def test_a_mistake_is_one_line() -> None:
    words = [sys.executable, "-m", "benchmarks.sac", "fast=yes"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and '"fast=yes" is not a setting' in done.stderr


def test_a_child_finds_the_package_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    put_root_on_path()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "elsewhere"]
    words = [sys.executable, "-P", "-c", "import benchmarks; print(benchmarks.__file__)"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "benchmarks" / "__init__.py"
