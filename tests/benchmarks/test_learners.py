"""The plain peers learn too: what the bench compares with is worth comparing with."""

from __future__ import annotations

import pytest
import torch

from benchmarks import learners
from benchmarks.learners import interpolated, learner_for
from benchmarks.peers import plain
from benchmarks.sac import ACT, OBS
from embodied.core.tensors import Tensors


def batch(n: int) -> Tensors:
    return {
        "obs/state": torch.randn(n, OBS),
        "action": torch.rand(n, ACT) * 2 - 1,
        "reward": torch.ones(n),
        "discount": torch.zeros(n),
        "next_obs/state": torch.randn(n, OBS),
    }


@pytest.mark.parametrize("kind", [plain.PlainSac, plain.PlainTd3])
def test_plain_learners_learn(kind: type[plain.PlainSac], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "LR", 3e-3)
    torch.manual_seed(0)
    learner = kind(OBS, ACT, (32,), "cpu")
    before = [p.detach().clone() for p in learner.policy.parameters()]
    for _ in range(150):
        learner.update(batch(64))
    rows = batch(100)
    with torch.no_grad():
        values = learner.values(learner.critics, rows["obs/state"], rows["action"])
    for q in values:  # every decision ends the world and pays 1
        assert q.mean().item() == pytest.approx(1.0, abs=0.15)
    moved = zip(before, learner.policy.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in moved)


@pytest.mark.parametrize("name", learners.POLICIES)
def test_every_learner_of_the_bench_updates(name: str) -> None:
    learner = learner_for(name, torch.device("cpu"), batch_size=8)
    assert learner.update(batch(8))["critic_loss"].isfinite()


def test_grid_sample_shifts_whole_pixels() -> None:
    planes = torch.randint(256, (20, 2, 9, 7), dtype=torch.uint8)
    assert torch.equal(interpolated(planes, 0).round().byte(), planes)
    shifted = interpolated(planes, 2)
    torch.testing.assert_close(shifted, shifted.round(), atol=1e-2, rtol=0)
