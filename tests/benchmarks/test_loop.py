"""The loop's bench: lateness, lost deadlines and stalls by hand, and everything once in small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import loop
from benchmarks.loop import EVERY, Deadlines, Sleeps, histogram, show, summary
from tests.tiers import only_all


def test_what_is_lost_and_what_of_it_in_a_stall() -> None:
    begin = 10 * EVERY - 0.5
    at = begin + np.array([0.0, 0.1, 0.2, 0.5, 0.6, 1.0, 1.1])  # two lost, then three
    row = summary("it", 10, at, np.array([0.0, 3e-5, 3e-5, 3e-4, 0.0, 0.02, 0.0]))
    assert (row.ticks, row.missed) == (7, 5)
    assert (row.stalls, row.stalled) == (1, 3), "the stall begins at 0.5 s"
    assert row.rate == pytest.approx(6 / 1.1) and row.error == pytest.approx(100 - 600 / 11)
    assert row.worst == pytest.approx(20.0) and row.p50 == pytest.approx(0.03)
    assert row.counts == (5, 0, 0, 1, 0, 0, 0, 0, 1)
    lines = histogram(row).splitlines()
    assert lines[1].split() == ["0", "to", "0.05", "ms", "5", "#" * 29]
    assert lines[-1].split()[:5] == ["10", "to", "more", "ms", "1"]


def test_relative_sleep_drifts_and_deadlines_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 0.002  # always wakes so late

    monkeypatch.setattr(loop.time, "sleep", sleep)
    for kind, error in ((Deadlines, 0.0), (Sleeps, 100 * (1 - 10 / 12))):
        rate = kind(100, 0.5)
        rate.clock = lambda: now[0]
        rate.begin()
        for _ in range(40):
            now[0] += 0.001
            rate.wait()
        row = summary(rate.name, 100, rate.at[: rate.ticks], rate.lates[: rate.ticks])
        assert row.error == pytest.approx(error, abs=1e-6) and row.missed == 0
        assert row.p50 == pytest.approx(2.0)


@only_all
def test_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "HERTZ", (50,))
    rows = loop.run(tmp_path, seconds=0.5, repeats=1)
    assert [row.loop for row in rows][:2] == [Deadlines.name, Sleeps.name]
    assert all(2 < row.ticks <= 27 and sum(row.counts) == row.ticks for row in rows)
    written = json.loads((tmp_path / "loop.json").read_text())["rows"]
    assert written[0]["notes"]["counts"] == list(rows[0].counts)
    reads = json.loads((tmp_path / "loop_bus.json").read_text())["rows"]
    assert len(reads) == 4 and all(row["ratio_median"] > 0 for row in reads)
    console = Console(record=True, width=140)
    show(rows, console)
    assert "absolute deadlines, 50 Hz: late by" in console.export_text()
