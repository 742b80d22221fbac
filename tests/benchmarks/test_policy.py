"""Benches of policies, policy servers and learners: every one is measured; peers learn too."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import learners
from benchmarks.learners import learner_for
from benchmarks.peers import plain
from benchmarks.policy import FEW, SAMPLERS, bare, files, made, run
from benchmarks.sac import ACT, OBS
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from tests.builders import Patch, transitions


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
def test_bare_calls_are_as_many_as_a_decision_makes(name: str, monkeypatch: Patch) -> None:
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


def batch(n: int) -> Tensors:
    """Every decision ends the world and pays 1."""
    spec = Spec({"state": Leaf((OBS,))}, Leaf((ACT,), low=-1.0, high=1.0), dt=0.1)
    return transitions(n, spec) | {"reward": torch.ones(n), "discount": torch.zeros(n)}


@pytest.mark.parametrize("kind", [plain.PlainSac, plain.PlainTd3])
def test_plain_learners_learn(kind: type[plain.PlainSac], monkeypatch: Patch) -> None:
    monkeypatch.setattr(plain, "LR", 3e-3)
    torch.manual_seed(0)
    learner = kind(OBS, ACT, (32,), "cpu")
    before = copy.deepcopy([*learner.policy.parameters()])
    for _ in range(150):
        learner.update(batch(64))
    rows = batch(100)
    with torch.no_grad():
        values = learner.values(learner.critics, rows["obs/state"], rows["action"])
    assert [q.mean().item() for q in values] == pytest.approx([1.0] * len(values), abs=0.15)
    moved = zip(before, learner.policy.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in moved)


@pytest.mark.parametrize("name", learners.POLICIES)
def test_every_learner_of_the_bench_updates(name: str) -> None:
    learner = learner_for(name, torch.device("cpu"), batch_size=8)
    assert learner.update(batch(8))["critic_loss"].isfinite()
