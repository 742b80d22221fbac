"""Side-by-side measurement by hand, what is written; commands: settings are words, children."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.command import ROOT, put_root_on_path, settings
from benchmarks.measure import Comparison, alone, compare, table, write_json
from embodied.core.build import ConfigError
from tests.builders import python


def test_ratio_is_the_median_over_pairs() -> None:
    rows = Comparison((10.0, 30.0, 40.0), (10.0, 10.0, 20.0))
    assert rows.ratios == (1.0, 3.0, 2.0)
    assert rows.ratio_median == 2.0
    assert rows.ratio_iqr == (1.5, 2.5)
    assert (rows.ours_rate, rows.theirs_rate) == (30.0, 10.0)


def test_blocks_take_turns_and_the_order_inside_a_pair_alternates() -> None:
    calls: list[str] = []

    def block(name: str) -> int:
        calls.append(name)
        return 1

    result = compare(lambda: block("a"), lambda: block("b"), repeats=3)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert len(result.ratios) == 3


def test_what_is_written_can_be_read_and_printed(tmp_path: Path) -> None:
    rows = [
        Comparison((2.0,), (1.0,), name="pair", target=1.5),
        alone(lambda: 5, repeats=2, name="lonely", unit="items"),
    ]
    assert math.isnan(rows[1].ratio_median)
    path = write_json(tmp_path / "new", "envs", rows)
    content = json.loads(path.read_text())
    assert path.name == "envs.json" and content["machine"]["versions"]["torch"]
    assert [row["ratio_median"] for row in content["rows"]] == [2.0, None]
    console = Console(record=True, width=120)
    table(rows, console=console)
    shown = console.export_text()
    assert "pair (steps)" in shown and "2.00" in shown and "lonely (items)" in shown


def test_nan_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path, "bad", [Comparison((math.nan,), (1.0,))])


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


def test_a_mistake_is_one_line() -> None:
    done = python("-m", "benchmarks.sac", "fast=yes")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and '"fast=yes" is not a setting' in done.stderr


def test_a_child_finds_the_package_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    put_root_on_path()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "elsewhere"]
    code = "import benchmarks; print(benchmarks.__file__)"
    done = python("-P", "-c", code, folder=tmp_path, PYTHONPATH=os.environ["PYTHONPATH"])
    assert Path(done.stdout.strip()) == ROOT / "benchmarks" / "__init__.py"
