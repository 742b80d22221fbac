"""H2O: the ratio of two known dynamics, the term of the gap by hand, and a run on two sources."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.learners.off_policy.h2o import even_cross_entropy, gap_term
from embodied.training.logger import read_metrics
from tests.builders import LINE, make_learner, make_policy, random_demos, transitions
from tests.training.test_train import run, settings

NOISE = 0.3  # std of both dynamics


def make(**settings: Any) -> Any:
    policy = make_policy("gaussian.Gaussian", LINE, hidden=[16])
    given = {"hidden": [16], "classifier_hidden": [64, 64], "classifier_lr": 3e-3, **settings}
    return make_learner("off_policy.h2o.H2o", policy, **given)


def moved(n: int, gain: float) -> tuple[Tensors, Tensor]:
    """Half real transitions s' = s + a / 2 + noise, half simulated ones of another gain; and the
    analytic log ratios [n]."""
    batch = transitions(n, LINE)
    real, action = torch.arange(n) % 2 == 0, batch["action"]
    means = [0.5 * action, gain * action]
    change = torch.where(real[:, None], *means) + NOISE * torch.randn(n, 1)
    batch |= {"next_obs/state": batch["obs/state"] + change, "real": real}
    exact = sum(sign * (change - mean).square() for sign, mean in zip((-1, 1), means, strict=True))
    assert isinstance(exact, Tensor)
    return batch, exact.squeeze(1) / (2 * NOISE**2)


def trained(gain: float) -> tuple[Any, Tensors, Tensor]:
    torch.manual_seed(0)
    learner = make(classifier_noise=0.0)
    first, _ = moved(4000, gain)
    learner.fit({key: value[first["real"]] for key, value in first.items()})
    for _ in range(500):
        learner.descend("classifiers", learner.classifier_loss(moved(256, gain)[0]))
    return learner, *moved(4000, gain)


def test_the_ratio_is_that_of_the_dynamics() -> None:
    learner, batch, exact = trained(gain=-0.5)
    found = learner.log_ratio(batch)
    assert torch.corrcoef(torch.stack([found, exact]))[0, 1] > 0.9
    assert found.abs().max() <= 4


def test_equal_dynamics_have_the_ratio_one() -> None:
    learner, batch, _ = trained(gain=0.5)
    assert learner.log_ratio(batch).exp().mean().item() == pytest.approx(1.0, abs=0.05)


def test_the_cross_entropy_counts_both_kinds_equally() -> None:
    logit, real = torch.tensor([2.0, -1.0, 0.0]), torch.tensor([True, False, False])
    expected = math.log1p(math.exp(-2)) + (math.log1p(math.exp(-1)) + math.log(2)) / 2
    assert even_cross_entropy(logit, real).item() == pytest.approx(expected / 2)


def test_the_gap_by_hand() -> None:
    q = torch.tensor([[3.0, 1.0, 2.0, 5.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    gap, real = torch.tensor([9.0, 1.0, 3.0, 9.0]), torch.tensor([True, False, False, True])
    found = gap_term(q, gap, real)
    expected = math.log(math.e / 4 + 3 * math.e**2 / 4) - 4
    assert found.tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    found[1].backward()
    assert q.grad is not None
    assert q.grad[1].tolist() == pytest.approx([-0.5, 0.25, 0.75, -0.5])
    only = gap_term(q, gap, torch.ones(4, dtype=torch.bool))  # as in pretraining
    assert only.isfinite().all()


def test_simulated_transitions_weigh_by_the_ratio() -> None:
    learner = make(gap_weight=0.0)
    learner.td_errors = []
    batch, _ = moved(8, 0.0)
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    torch.manual_seed(3)
    loss, _ = learner._critic_loss(batch)
    torch.manual_seed(3)
    backup = learner._backup(batch["reward"], batch["discount"], {"state": batch["next_obs/state"]})
    ratio = learner.log_ratio(batch).exp().clamp(1e-5, 1.0)
    weight = torch.where(batch["real"], 1.0, ratio)
    assert ratio.min() < 1
    torch.testing.assert_close(loss, ((q - backup).square() * weight).mean(1).sum())


def test_a_run_mixes_recordings_and_the_simulator(tmp_path: Path) -> None:
    demos = random_demos(tmp_path / "set", 4)
    node = settings(tmp_path / "run", demos=demos, steps=60, warmup_steps=20, log_every=20)
    node["learner"] = {"_target_": "embodied.learners.off_policy.h2o.H2o", "batch_size": 16}
    run(node)
    last = [row for row in read_metrics(tmp_path / "run") if "train/classifier_loss" in row][-1]
    assert 0 < last["train/classifier_loss"] < 3


def test_n_step_returns_are_refused() -> None:
    with pytest.raises(ConfigError, match="single steps"):
        make(n_step=3)
