"""Imitation: the step, the average of the weights, the rate and the normalisers."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.imitation import BehaviorCloning, Config, cosine
from embodied.learners.learner import RunPlan

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(kind: str = "gaussian.Gaussian", steps: int = 100, **settings: float) -> BehaviorCloning:
    torch.manual_seed(0)
    node = {"_target_": f"embodied.policies.{kind}", "chunk": 2}
    return BehaviorCloning(Config(**settings), build(node, Policy, spec=SPEC), run=RunPlan(steps))


def batches(count: int, n: int = 32) -> list[Tensors]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(count):
        state = torch.randn(n, 2, generator=generator)
        action = torch.tanh(state[:, :1] - state[:, 1:]).expand(n, 2)[..., None].contiguous()
        valid = torch.ones(n, 2, dtype=torch.bool)
        result.append({"obs/state": state, "action": action, "valid": valid})
    return result


def flat(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_the_average_is_the_one_of_the_formula_or_none() -> None:
    learner = make(ema=0.6)
    average = flat(learner.policy).double()
    assert torch.equal(average.float(), flat(learner.online))
    for step, batch in enumerate(batches(8), start=1):
        learner.update(batch)
        ema = min(0.6, (1 + step) / (10 + step))
        average = ema * average + (1 - ema) * flat(learner.online).double()
    torch.testing.assert_close(flat(learner.policy).double(), average, atol=1e-6, rtol=1e-5)
    assert not torch.equal(flat(learner.policy), flat(learner.online))
    learner = make(ema=0.0)
    learner.update(batches(1)[0])
    torch.testing.assert_close(flat(learner.policy), flat(learner.online))


def test_one_step_is_adams() -> None:
    learner = make(weight_decay=0.0, lr=0.01)
    before, batch = flat(learner.online), batches(1)[0]
    reference = copy.deepcopy(learner.online)
    reference.loss(batch).mean().backward()
    slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    gradient = torch.cat([slope.flatten() for slope in slopes])
    metrics = learner.update(batch)
    # The first step of Adam is lr * g / (|g| + eps).
    expected = before - 0.01 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(flat(learner.online), expected, atol=1e-6, rtol=1e-5)
    assert metrics["grad_norm"].item() == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert all(not value.requires_grad and value.ndim == 0 for value in metrics.values())


def test_the_rate_falls_to_a_tenth_and_stays() -> None:
    assert cosine(2.0, 0.0) == 2.0
    assert cosine(2.0, 0.5) == pytest.approx(1.1)
    assert cosine(2.0, 0.25) == pytest.approx(2 * (0.55 + 0.45 * math.sqrt(0.5)))
    assert cosine(2.0, 1.0) == cosine(2.0, 3.0) == pytest.approx(0.2)
    learner = make(steps=4, lr=0.5)
    for batch in batches(4):
        learner.update(batch)
    assert learner.optims["adam"].param_groups[0]["lr"] == cosine(0.5, 0.75)


def test_fitting_sets_the_normalisers_of_both() -> None:
    learner = make("generative.flow.Flow")
    rows = batches(1)[0]
    rows = {**rows, "obs/state": 5 * rows["obs/state"] + 3, "action": 0.5 * rows["action"]}
    learner.fit(rows)
    acting, trained = dict(learner.policy.named_buffers()), dict(learner.online.named_buffers())
    assert acting.keys() == trained.keys() and acting
    assert all(torch.equal(acting[name], trained[name]) for name in acting)
    torch.testing.assert_close(acting["encoder.norm.mean"], rows["obs/state"].mean(0))
