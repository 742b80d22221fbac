"""DPO: the loss by hand, the base as its reference, and the preferred mode of two."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from tests.builders import make_learner, make_policy

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def made(target: str = "deterministic.Deterministic", chunk: int = 2, **settings: Any) -> Any:
    torch.manual_seed(0)
    policy = make_policy(target, SPEC, chunk=chunk)
    return make_learner("finetune.dpo.Dpo", policy, **({"segment": 4} | settings))


def pairs(n: int) -> Tensors:
    """Both modes of the actions, -0.5 and 0.5, in one state; the upper one is preferred."""
    upper = torch.rand(n) < 0.5
    sign = torch.stack([~upper, upper], 1).float() - 0.5
    noise = 0.02 * torch.randn(n, 2, 4, 1)
    return {
        "obs/state": torch.zeros(n, 2, 4, 1),
        "action": sign[:, :, None, None] + noise,
        "label": upper.float(),
    }


def shifted(errors: Tensor) -> Any:
    """A loss whose values are `errors`, whatever the batch, plus a parameter's influence."""
    return lambda batch: errors + 0 * batch["action"].sum()


def test_the_loss_by_hand() -> None:
    """Two segments of two chunks. d_1 = (3 + 1) / 2 - 1, d_2 = (0.5 + 0.5) / 2 - 1."""
    learner = made(beta=2.0)
    weight = next(learner.policy.parameters())
    learner.reference.loss = shifted(torch.ones(4))
    errors = torch.tensor([3.0, 1.0, 0.5, 0.5])
    learner.policy.loss = lambda batch: errors + 0 * weight.sum()
    batch = {**pairs(1), "label": torch.tensor([1.0])}
    assert learner.update(batch)["loss"].item() == pytest.approx(math.log1p(math.exp(-2 * 1.5)))
    batch["label"] = torch.tensor([0.25])
    hand = 0.25 * math.log1p(math.exp(-3)) + 0.75 * math.log1p(math.exp(3))
    assert learner.update(batch)["loss"].item() == pytest.approx(hand)


def test_the_decisions_of_a_segment_are_its_chunks() -> None:
    learner = made()
    action = torch.arange(8.0).view(1, 2, 4, 1)
    chunks = learner.chunks({"obs/state": action + 10, "action": action})
    assert chunks["obs/state"].flatten().tolist() == [10, 12, 14, 16]
    assert chunks["action"][:, :, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_policy_and_reference_have_the_same_noise() -> None:
    """So the first loss is log 2 exactly, with the random levels and noise of diffusion too."""
    learner = made("generative.diffusion.Diffusion")
    metrics = learner.update(pairs(8))
    assert metrics["loss"].item() == pytest.approx(math.log(2))
    assert metrics["error_gain"].item() == 0
    before = [weight.clone() for weight in learner.reference.parameters()]
    learner.update(pairs(8))
    assert all(map(torch.equal, before, learner.reference.parameters()))


def test_the_preferred_mode_of_a_flow_is_taken() -> None:
    """Cloned, half of the samples are of each mode; after DPO of it more than 80% of one."""
    torch.manual_seed(0)
    policy = make_policy("generative.flow.Flow", SPEC, chunk=2, width=32)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(400):
        batch = pairs(64)
        chunks = {"obs/state": batch["obs/state"][:, :, 0].flatten(0, 1)}
        action = batch["action"][:, :, :2].flatten(0, 1)
        valid = torch.ones(action.shape[:2], dtype=torch.bool)
        policy.loss({**chunks, "action": action, "valid": valid}).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0.3 < share_above(policy) < 0.7
    learner = make_learner("finetune.dpo.Dpo", policy, segment=4, lr=1e-3, beta=20.0)
    shown = pairs(50)
    for _ in range(150):
        index = torch.randint(50, (32,))
        learner.update({key: value[index] for key, value in shown.items()})
    assert share_above(learner.policy) > 0.8


@torch.no_grad()
def share_above(policy: Any) -> float:
    noise = torch.randn(400, policy.size, generator=torch.Generator().manual_seed(1))
    action, _ = policy.act({"state": torch.zeros(400, 1)}, {}, noise)
    return float((action.mean((1, 2)) > 0).float().mean())


def test_a_segment_is_of_whole_chunks() -> None:
    with pytest.raises(ConfigError, match="segment=5 should be a multiple of the policy's chunk=2"):
        made(segment=5)
    with pytest.raises(ConfigError, match="needs a policy with one"):
        make_learner("finetune.dpo.Dpo", make_policy("random.Random", SPEC))
