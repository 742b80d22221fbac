"""The bench of policy servers, once in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import remote
from embodied.core import build as core_build


def test_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_build, "ASKED", [])
    rows = remote.run(tmp_path, repeats=1, calls=3)
    assert len(rows) == len(remote.SPECS) * len(remote.BATCHES)
    assert all(row.notes["p99_ms"] >= row.notes["median_ms"] > 0 for row in rows)
    assert rows[2].notes["bytes"] == 2 * 224 * 224 * 3 + 14 * 4
    written = json.loads((tmp_path / "remote.json").read_text())
    assert [each["name"] for each in written["rows"]] == [row.name for row in rows]
