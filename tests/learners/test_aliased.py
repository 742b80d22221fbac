"""Noise-aliased latent learning: losses by hand, a known optimum, a base that never moves."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.finetune.dsrl_na import DsrlNa, distil_loss
from embodied.learners.learner import Learner, RunPlan
from embodied.policies.steering import dsrl_na
from tests.builders import node_of

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
BASE = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 2, "width": 16, "depth": 1}
INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [32]}
LEARNER = node_of("learners.finetune.dsrl_na.DsrlNa", batch_size=64, hidden=[32])


def made(base: dict[str, Any] = BASE, **settings: Any) -> DsrlNa:
    torch.manual_seed(0)
    policy = dsrl_na.DsrlNa.wrap(
        build(base, Policy, spec=SPEC),
        {"_target_": "embodied.policies.steering.dsrl_na.DsrlNa", "bound": 2.0},
        INNER,
    )
    return build(LEARNER | settings, Learner, policy=policy)


def rows(action: Tensor, reward: Tensor, discount: float = 0.0) -> Tensors:
    n = len(action)
    state = torch.zeros(2, n, 2)
    full = torch.full((n,), discount)
    kept = {"action": action, "reward": reward, "discount": full}
    return {"obs/state": state[0], "next_obs/state": state[1], **kept}


def digest(learner: DsrlNa) -> str:
    parts = [v.numpy().tobytes() for v in learner.policy.base.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_distil_loss_by_hand() -> None:
    """Member to member: 1/2 mean([1, 9]) + 1/2 mean([0, 4]) = 2.5 + 1."""
    q = torch.tensor([[1.0, 4.0], [0.0, 0.0]])
    target = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    assert distil_loss(q, target).item() == pytest.approx(3.5)


def test_backup_is_the_least_value_of_what_the_base_does_at_the_chosen_noise() -> None:
    learner = made(entropy_in_backup=True, initial_temperature=0.5)
    reward, discount = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.9])
    state = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    torch.manual_seed(5)
    got = learner._backup(reward, discount, {"state": state})
    torch.manual_seed(5)
    u, log_prob = learner.actor.sample({"state": state}, learner.actor.sample_noise(2, True))
    chunk, _ = learner.policy.base.act({"state": state}, {}, 2.0 * u)
    q = learner.target({"state": state}, chunk.flatten(1)).min(0).values
    assert got[0].item() == 1.0
    assert got[1].item() == pytest.approx((2 + 0.9 * (q - 0.5 * log_prob))[1].item(), rel=1e-5)


def test_rows_hold_what_was_executed() -> None:
    learner = made()
    actor = Actor(learner.policy, 3, explore=True)
    first = actor({"state": torch.randn(3, 2)}, torch.ones(3, dtype=torch.bool))
    assert actor.stored_action.shape == (3, 2)
    assert torch.equal(actor.stored_action[:, :1], first)


def test_noises_are_the_actors_and_normal_ones() -> None:
    learner = made(actor_share=0.25)
    torch.manual_seed(1)
    u = learner._noises({"state": torch.zeros(4000, 2)})
    assert u[:1000].abs().max() <= 1
    assert (2.0 * u[1000:]).std().item() == pytest.approx(1, abs=0.03)
    assert made(actor_share=0.0)._noises({"state": torch.zeros(9, 2)}).shape == (9, 2)


def test_it_learns_from_what_another_policy_did_and_the_base_stays() -> None:
    """One decision pays -|a - a*|^2; the rows are uniform actions, none of them the base's. a* is
    what the base does at a noise within the bound, so the best that steering can do is 0."""
    learner = made(actor_lr=3e-3, critic_lr=3e-3, initial_temperature=1e-4)
    before, state = digest(learner), {"state": torch.zeros(1, 2)}
    best = learner.policy.play(state, torch.tensor([[0.8, -0.7]])).flatten(1)
    first = learner.policy.play(state, torch.zeros(1, 2)).flatten(1)
    action = torch.rand(4096, 2) * 2 - 1
    reward = -(action - best).square().sum(1)
    for _ in range(400):
        pick = torch.randint(4096, (64,))
        learner.update(rows(action[pick], reward[pick]))
    with torch.no_grad():
        u = learner.actor.act(state, {}, learner.actor.sample_noise(1))[0].squeeze(1)
        last = learner.policy.play(state, u).flatten(1)
        begun, ended = ((a - best).square().sum().item() for a in (first, last))
    assert begun > 0.1
    assert ended < 0.1 * begun, (begun, ended)
    assert digest(learner) == before
    assert all(p.grad is None for p in learner.policy.base.parameters())


def test_part_of_a_chunk() -> None:
    """With execute=1 of 2, critics judge the one action that was played."""
    policy = made().policy
    learner: DsrlNa = build(LEARNER, DsrlNa, policy=policy, run=RunPlan(execute=1))
    learner.update(rows(torch.zeros(64, 1), torch.ones(64)))
    assert learner.critic.ensemble.weights[0].shape[1] == 2 + 1


def test_a_base_that_ignores_its_noise_is_refused() -> None:
    learner = made()
    learner.fit(rows(torch.zeros(64, 2), torch.zeros(64)))
    learner.policy.base.get_buffer("range.radius").zero_()
    with pytest.raises(ConfigError, match="nothing to steer"):
        learner.fit(rows(torch.zeros(64, 2), torch.zeros(64)))


def test_other_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="finetune=dsrl_na"):
        build(LEARNER, Learner, policy=build(INNER, Policy, spec=SPEC))
