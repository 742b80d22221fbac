"""Side-by-side measurement: the arithmetic by hand, the order of blocks, what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.measure import Comparison, alone, compare, table, write_json


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
