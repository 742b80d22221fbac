"""The latency bench measures every policy that ships and writes what it measured."""

from __future__ import annotations

import json
from pathlib import Path

from embodied.bench.policy import files, run


def test_every_policy_has_a_row(tmp_path: Path) -> None:
    rows = run(tmp_path, repeats=1, calls=5)
    assert [row.name for row in rows] == [path.stem for path in files()]
    written = json.loads((tmp_path / "policy.json").read_text())["rows"]
    for row in written:
        assert 0 < row["notes"]["median_ms"] <= row["notes"]["p99_ms"]
    assert {"flow", "gaussian", "diffusion"} <= {row["name"] for row in written}
