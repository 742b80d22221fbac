"""Normal: densities by hand and against torch's own, clipping, the start near zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.policies.diagonal_gaussian import DiagonalGaussian
from tests.builders import make_policy

ACT = Leaf((2,), low=-1.0, high=1.0)
SPEC = Spec({"state": Leaf((3,))}, ACT, dt=0.1)


def make(**settings: Any) -> DiagonalGaussian:
    return make_policy("diagonal_gaussian.DiagonalGaussian", SPEC, **{"hidden": [8], **settings})


def test_density_and_entropy_by_hand() -> None:
    policy = make(zero_head=True, log_std=math.log(2.0))
    log_prob, entropy = policy.evaluate_actions(
        {"state": torch.randn(1, 3)}, torch.tensor([[2.0, -4.0]])
    )
    # z = (1, -2): -(1 + 4) / 2 - 2 log 2 - log 2 pi; entropy 2 (log 2 + (1 + log 2 pi) / 2)
    assert log_prob.item() == pytest.approx(-2.5 - 2 * math.log(2) - math.log(2 * math.pi))
    assert entropy.item() == pytest.approx(2 * math.log(2) + 1 + math.log(2 * math.pi))
    assert policy.entropy({"state": torch.randn(4, 3)}).tolist() == pytest.approx(
        [entropy.item()] * 4
    )


def test_log_prob_and_entropy_are_torchs_with_their_gradients() -> None:
    torch.manual_seed(0)
    policy = make(head=1.0)
    obs = {"state": torch.randn(7, len(policy.encoder.norm.mean))}
    action, weight = torch.randn(7, policy.size), torch.randn(7)
    found: list[list[torch.Tensor]] = []
    normal = torch.distributions.Normal(policy(obs), policy.log_std.exp())
    theirs = (normal.log_prob(action).sum(1), normal.entropy().sum(1))
    for density, entropy in (policy.evaluate_actions(obs, action), theirs):
        loss = (density * weight).sum() + 3 * entropy.mean()
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
        found.append([density, entropy, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_part_of_a_chunk() -> None:
    policy = make(chunk=3, head=1.0)
    obs, action = {"state": torch.randn(5, 3)}, torch.randn(5, 6)
    some, _ = policy.evaluate_actions(obs, action[:, :2])
    mean = policy(obs)[:, :2]
    expected = torch.distributions.Normal(mean, 1.0).log_prob(action[:, :2]).sum(1)
    torch.testing.assert_close(some, expected)


def test_the_robot_gets_the_clipped_action_and_the_learner_the_whole() -> None:
    policy = make(log_std=1.0)
    actor = Actor(policy, 50, explore=True)
    action = actor({"state": torch.randn(50, 3)}, torch.ones(50, dtype=torch.bool))
    assert actor.stored_action.abs().max() > 2
    assert torch.equal(action, actor.stored_action.clamp(-1, 1))


def test_it_begins_near_zero_and_orthogonal() -> None:
    obs = {"state": 5 * torch.randn(100, 3)}
    assert not make(zero_head=True)(obs).any()
    assert 1e-4 < make()(obs).std() < 0.1
    weight = make().net[0].weight
    torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(3))
    assert not make(learn_std=False).log_std.requires_grad


def test_discrete_actions_are_refused() -> None:
    spec = SPEC.with_act(Leaf((), "int64", 0, 3))
    with pytest.raises(ConfigError, match="continuous"):
        build(
            {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian"}, Policy, spec=spec
        )
