"""The latency bench measures every policy that ships and writes what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.policy import FEW, SAMPLERS, bare, files, made, run


def test_every_policy_has_a_row_and_few_steps_are_compared_with_many(tmp_path: Path) -> None:
    rows = run(tmp_path, repeats=1, calls=5)
    assert [row.name for row in rows] == [path.stem for path in files()]
    written = json.loads((tmp_path / "policy.json").read_text())["rows"]
    for row in written:
        assert 0 < row["notes"]["median_ms"] <= row["notes"]["p99_ms"]
    assert {"flow", "gaussian", "diffusion"} <= {row["name"] for row in written}
    ratios = json.loads((tmp_path / "policy_ratios.json").read_text())["rows"]
    assert [row["name"] for row in ratios][: len(FEW) + len(SAMPLERS)] == [*FEW, *SAMPLERS]
    assert all(row["ratio_median"] > 0 and row["target"] for row in ratios)


@pytest.mark.parametrize("name", SAMPLERS)
def test_bare_calls_are_as_many_as_a_decision_makes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, calls = SAMPLERS[name], [0]
    policy: Any = made(node).eval()
    network = type(policy.net)
    at = network.at

    def counted(self: object, *given: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return at(self, *given)

    monkeypatch.setattr(network, "at", counted)
    with torch.no_grad():
        policy.act({"state": torch.randn(1, 32)}, {}, policy.sample_noise(1))
    assert calls == [20]
    assert bare(node, 3)() == 3
    assert calls == [20 + 3 * 20]
