"""CPL: its loss by hand, what moves it and what does not, and a preference that it follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.learners.learner import RunPlan
from embodied.learners.offline.cpl import contrastive_loss
from tests.builders import SPEC, make_learner, make_policy


def make(chunk: int = 1, updates: int = 0, **settings: Any) -> Any:
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[32], chunk=chunk)
    return make_learner("offline.cpl.Cpl", policy, RunPlan(updates), segment=4, **settings)


def pairs(n: int) -> Tensors:
    """Segments of one state; preferred is the one with the larger actions."""
    action = torch.rand(n, 2, 4, 2) - 0.5
    total = action.sum((2, 3))
    label = (total[:, 1] > total[:, 0]).float()
    return {"obs/state": torch.zeros(n, 2, 4, 3), "action": action, "label": label}


def test_the_loss_and_its_gradient_by_hand() -> None:
    first, second = torch.tensor([-1.0]), torch.tensor([-3.0])
    for label, expected in (
        (1.0, math.log1p(math.exp(3 - 0.5))),
        (0.0, math.log1p(math.exp(1 - 1.5))),
        (0.5, (math.log1p(math.exp(2.5)) + math.log1p(math.exp(-0.5))) / 2),
    ):
        loss = contrastive_loss(first, second, torch.tensor([label]), 0.5)
        assert loss.item() == pytest.approx(expected)
    # Pull to the winner by p, the probability of the wrong order, push from the loser by bias p.
    scores = [score.clone().requires_grad_() for score in (first, second)]
    contrastive_loss(scores[0], scores[1], torch.ones(1), 0.5).backward()
    wrong = 1 / (1 + math.exp(-2.5))
    slopes = [score.grad.item() for score in scores if score.grad is not None]
    assert slopes == pytest.approx([0.5 * wrong, -wrong])


def test_only_with_a_bias_of_one_a_common_shift_changes_nothing() -> None:
    torch.manual_seed(0)
    first, second, label = torch.randn(8), torch.randn(8), torch.randint(3, (8,)) / 2
    for bias, same in ((1.0, True), (0.5, False)):
        one = contrastive_loss(first, second, label, bias)
        other = contrastive_loss(first - 5, second - 5, label, bias)
        assert math.isclose(one.item(), other.item(), rel_tol=1e-5) == same
        assert same or other > one  # data that became unlikely


def test_ties_of_equal_segments_have_no_gradient() -> None:
    learner = make(bias=1.0)
    batch = pairs(6)
    twice = batch["action"][:, :1].expand(-1, 2, -1, -1)
    loss, _ = learner._loss(False, batch | {"action": twice, "label": torch.full((6,), 0.5)})
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in learner.policy.parameters()])
    assert grads.abs().max() < 1e-6


def test_the_score_is_the_squared_distance() -> None:
    learner = make()
    batch = pairs(5)
    mean = learner.policy({"state": torch.zeros(1, 3)})
    expected = -(batch["action"] - mean).square().sum(3)
    torch.testing.assert_close(learner.log_prob(batch), expected)


def test_first_it_clones_then_it_follows_the_preference() -> None:
    """Actions in [-0.5, 0.5]: cloned, their mean; preferred are those near 0.5."""
    learner = make(updates=500, clone=0.4, lr=3e-3, bias=0.9, alpha=1.0)
    means: list[float] = []
    for number in range(500):
        learner.update(pairs(32))
        if number in (199, 499):
            means.append(learner.policy({"state": torch.zeros(1, 3)}).mean().item())
    assert abs(means[0]) < 0.1 and means[1] > 0.3
    assert learner.update(pairs(256))["agreement"] > 0.9


def test_chunks_are_refused() -> None:
    with pytest.raises(ConfigError, match="single steps"):
        make(chunk=2)
