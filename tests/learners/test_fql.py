"""FQL: each term of its losses by hand, what each may move, a problem to solve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import under
from embodied.learners.imitation.behavior_cloning import behaviour
from embodied.learners.offline.fql import Fql, value_loss
from tests.builders import make_learner, make_policy, node_of
from tests.learners.bandit import slopes, two_modes

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "width": 16, "depth": 1}


def make(chunk: int = 1, **settings: Any) -> Fql:
    policy = make_policy(
        "generative.one_step.OneStep", SPEC, flow=FLOW, hidden=[32, 32], chunk=chunk
    )
    given = {"batch_size": 16, "hidden": [16], "normalize_q": False, **settings}
    return make_learner("offline.fql.Fql", policy, **given)


def test_value_loss_by_hand() -> None:
    q = torch.tensor([1.0, -3.0, 5.0], requires_grad=True)
    assert value_loss(q, False).item() == -1.0
    loss = value_loss(q, True)  # mean |Q| is 3
    assert loss.item() == pytest.approx(-1 / 3)
    loss.backward()
    assert q.grad is not None  # the scale has no slope: each of three gets -1/3 * 1/3
    torch.testing.assert_close(q.grad, torch.full((3,), -1 / 9))


@pytest.mark.parametrize("aggregate", ["mean", "min"])
def test_the_target_follows_the_one_step_policy(aggregate: str) -> None:
    learner = make(hidden=(), aggregate=aggregate)
    torch.nn.init.constant_(learner.policy.net[-1].bias, 1.0)  # some actions are cut off
    slopes(learner.target, [1.0, -2.0])
    following, reward = {"state": torch.randn(8, 1)}, torch.arange(8.0)
    discount = torch.tensor([0.9] * 4 + [0.81] * 3 + [0.0])
    torch.manual_seed(2)
    action = learner.policy(following, torch.randn(8, 1))[:, 0].clamp(-1, 1)
    assert action.max() == 1.0 and action.min() < 1.0
    value = -0.5 * action if aggregate == "mean" else torch.minimum(action, -2 * action)
    torch.manual_seed(2)
    backup = learner._backup(reward, discount, following)
    torch.testing.assert_close(backup, reward + discount * value)


def test_the_three_terms_by_hand() -> None:
    learner = make(chunk=2, hidden=())
    slopes(learner.critic, [1.0, 3.0])  # of the last of two steps
    steps = {"executed_steps": torch.tensor([2, 1] * 8)}
    batch = two_modes(16) | {"action": torch.rand(16, 2) * 2 - 1} | steps
    obs = under(batch, "obs")
    torch.manual_seed(3)
    flow, distil, value = learner._actor_loss(batch)
    torch.manual_seed(3)
    noise = torch.randn(16, 2)
    mu, ode = learner.policy(obs, noise), learner.policy.flow.act(obs, {}, noise)[0].flatten(1)
    torch.testing.assert_close(distil, (mu - ode).square().mean())
    torch.testing.assert_close(value, -(2 * mu[:, 1].clamp(-1, 1)).mean())
    torch.testing.assert_close(
        flow, learner.policy.flow.loss(behaviour(batch, learner.policy)).mean()
    )


def test_what_each_term_moves() -> None:
    """Distillation and value move the one-step network only, never the flow."""
    learner = make()
    flow, distil, value = learner._actor_loss(two_modes(16))
    (distil + value).backward(retain_graph=True)
    assert all(weight.grad is None for weight in learner.policy.flow.parameters())
    assert all(weight.grad is not None for weight in learner.policy.net.parameters())
    learner.policy.zero_grad()
    flow.backward()
    assert all(weight.grad is not None for weight in learner.policy.flow.parameters())
    assert all(weight.grad is None for weight in learner.policy.net.parameters())


def test_the_actor_step_leaves_the_critics_alone_and_targets_follow() -> None:
    learner = make(tau=0.3)
    learner.optims["critic"].param_groups[0]["lr"] = 0.0
    before = [weight.detach().clone() for weight in learner.critic_params]
    torch._foreach_add_(learner.target_params, 1.0)
    learner.update(two_modes(16))
    for old, new, average in zip(before, learner.critic_params, learner.target_params, strict=True):
        assert torch.equal(old, new) and new.grad is None and new.requires_grad
        torch.testing.assert_close(average, 0.7 * (old + 1) + 0.3 * old)


def test_keeps_both_modes_in_the_flow_and_acts_in_the_better_one() -> None:
    rates = {"actor_lr": 3e-3, "critic_lr": 3e-3}
    learner = make(batch_size=64, alpha=0.3, normalize_q=True, **rates)
    for _ in range(300):
        learner.update(two_modes(64))
    obs, policy = {"state": torch.zeros(200, 1)}, learner.policy
    cloned = policy.flow.act(obs, {}, policy.sample_noise(200))[0]
    assert 0.3 < (cloned > 0).float().mean() < 0.7
    assert (policy.act(obs, {}, policy.sample_noise(200))[0] > 0).float().mean() > 0.95


def test_without_values_it_distils_the_flow() -> None:
    """Cloning alone: the one-step network follows the flow through noise."""
    torch.manual_seed(0)
    policy = make().policy
    adam = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(400):
        adam.zero_grad()
        policy.loss(behaviour(two_modes(64), policy)).mean().backward()
        adam.step()
    obs, noise = {"state": torch.zeros(200, 1)}, policy.sample_noise(200)
    gap = policy.act(obs, {}, noise)[0].flatten(1) - policy.teacher(obs, noise)
    assert gap.square().mean() < 0.02
    assert policy.teacher(obs, noise).var() > 0.1


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="policy=one_step"):
        make_learner("offline.fql.Fql", build(FLOW, Policy, spec=SPEC))
    wide = {"_target_": "embodied.policies.wrappers.best_of_n.BestOfN", "base": FLOW, "n": 2}
    critic = {"_target_": "embodied.learners.critics.Critic", "n": 1, "hidden": [4]}
    with pytest.raises(ConfigError, match="as large as its chunk"):
        node = node_of("policies.generative.one_step.OneStep", flow={**wide, "critic": critic})
        build(node, Policy, spec=SPEC)
