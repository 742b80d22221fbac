"""IQL: its three losses by hand, the expectile's fixed point, and which action it prefers."""

from __future__ import annotations

import math

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner, RunPlan
from embodied.learners.offline.iql import Iql, awr_weight, expectile_loss, falling
from tests.builders import make_learner, node_of, still, transitions

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make(spec: Spec = SPEC, policy: str = "deterministic.Deterministic", **settings: object) -> Iql:
    torch.manual_seed(0)
    made = build({"_target_": f"embodied.policies.{policy}", "hidden": [32]}, Policy, spec=spec)
    given = {"hidden": [32], "batch_size": 4, **settings}
    node = {"_target_": "embodied.learners.offline.iql.Iql", **given}
    return build(node, Learner, policy=made, spec=spec, run=RunPlan(100))


def batch_of(n: int) -> Tensors:
    batch = transitions(n, SPEC)
    batch["discount"][-1] = 0.0
    return batch


@torch.no_grad()
def constant(learner: Iql, q: list[float], value: float) -> None:
    """Target critic i answers q[i] everywhere, V is `value`."""
    for net in (learner.target.ensemble, learner.value.net):
        for parameter in net.parameters():
            parameter.zero_()
    learner.target.ensemble.biases[-1].copy_(torch.tensor(q).view(-1, 1, 1))
    learner.value.net.biases[-1].fill_(value)


def test_expectile_by_hand() -> None:
    gap = torch.tensor([2.0, -1.0, 0.5])
    expected = (0.7 * 4 + 0.3 * 1 + 0.7 * 0.25) / 3
    assert expectile_loss(gap, 0.7).item() == pytest.approx(expected)
    assert expectile_loss(gap, 0.5).item() == pytest.approx(0.5 * gap.square().mean().item())


def test_the_minimum_is_the_expectile() -> None:
    """Q is 0 or 1, as often: tau (1 - v) = (1 - tau) v, so v = tau."""
    q = torch.tensor([0.0, 1.0])
    for tau in (0.5, 0.7, 0.9):
        value = torch.tensor(tau, requires_grad=True)
        expectile_loss(q - value, tau).backward()
        assert value.grad is not None and abs(value.grad.item()) < 1e-6


def test_weights_by_hand() -> None:
    weight = awr_weight(torch.tensor([0.0, 1.0, -2.0, 5.0, 1e9]), 3.0, 100.0)
    assert weight.tolist() == pytest.approx([1, math.exp(3), math.exp(-6), 100, 100], rel=1e-5)


def test_the_rate_falls_to_zero() -> None:
    assert [falling(p) for p in (0.0, 0.5, 1.0, 2.0)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    learner = make()
    rates = []
    for _ in range(101):
        learner.update(batch_of(4))
        rates.append(learner.optims["actor"].param_groups[0]["lr"])
    assert rates[0] == 3e-4 and rates[50] == pytest.approx(1.5e-4) and rates[100] == 0
    steady = make(cosine=False)
    steady.update(batch_of(4))
    assert steady.optims["actor"].param_groups[0]["lr"] == 3e-4


def test_the_three_losses_by_hand() -> None:
    """Q' = min(4, 3) = 3 and V = 1 everywhere: the advantage is 2, the weight exp(0.2)."""
    learner = make(expectile=0.8, beta=0.1)
    constant(learner, [4.0, 3.0], 1.0)
    batch = batch_of(4)
    losses, metrics = learner._loss(batch)
    action = torch.tanh(learner.policy.get_submodule("net")(batch["obs/state"]))
    regression = (action - batch["action"]).square().mean(1)
    obs = {"state": batch["obs/state"]}
    backup = torch.tensor([0.9, 1.9, 2.9, 3.0])  # r + 0.9 V, and r where the world ended
    q = learner.critic(obs, batch["action"])
    expected = [
        0.8 * 4,
        math.exp(0.2) * regression.mean().item(),
        (q - backup).square().mean(1).sum().item(),
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert metrics["advantage"].item() == 2
    assert metrics["weight"].item() == pytest.approx(math.exp(0.2))


def test_each_loss_moves_its_own_part() -> None:
    learner = make()
    losses, _ = learner._loss(batch_of(4))
    parts = (learner.value, learner.policy, learner.critic)
    for loss, mine in zip(losses, parts, strict=True):
        learner.zero_grad()
        loss.backward(retain_graph=True)
        for part in parts:
            moved = [p.grad is not None and bool(p.grad.any()) for p in part.parameters()]
            assert any(moved) == (part is mine)


def test_the_gaussian_likelihood_is_weighted() -> None:
    """With policy.imitate=nll the loss is -exp(beta A) log pi(a|s), per action element."""
    torch.manual_seed(0)
    node = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [32], "imitate": "nll"}
    policy = build(node, Policy, spec=SPEC)
    learner = make_learner("offline.iql.Iql", policy, run=RunPlan(10), hidden=[32], beta=0.1)
    constant(learner, [3.0, 3.0], 1.0)
    batch = batch_of(4)
    log_prob = policy.log_prob({"state": batch["obs/state"]}, batch["action"])
    losses, _ = learner._loss(batch)
    assert losses[1].item() == pytest.approx(-math.exp(0.2) * log_prob.mean().item() / 2, rel=1e-5)


def test_a_flow_policy_can_be_extracted() -> None:
    torch.manual_seed(0)
    node = node_of("policies.generative.flow.Flow", chunk=3, width=16, depth=1)
    policy = build(node, Policy, spec=SPEC)
    learner = make_learner("offline.iql.Iql", policy, run=RunPlan(10), hidden=[16])
    steps = {"executed_steps": torch.tensor([3, 3, 2, 1])}
    batch = batch_of(4) | {"action": torch.rand(4, 6) * 2 - 1} | steps
    assert torch.isfinite(learner.update(batch)["actor_loss"])


def test_prefers_the_better_half_of_the_data() -> None:
    """One state; the data pulls to -0.5 with reward 0 three times in four, to 0.5 with reward 1.

    Plain cloning ends at their mean, -0.25; V_0.9 is 0.75 (0.9 p (1 - v) = 0.1 (1 - p) v, p = 1/4),
    the weights e^1.25 = 3.49 and, three times, e^-3.75 = 0.0235; (3.49 - 0.07) / (3.49 + 0.07) / 2
    is 0.48.
    """
    learner = make(
        SPEC, beta=5.0, expectile=0.9, cosine=False, tau=0.1, actor_lr=3e-3, critic_lr=3e-3,
        value_lr=3e-3,
    )  # fmt: skip
    good = torch.arange(256) % 4 == 0
    side = torch.where(good, 0.5, -0.5)
    for _ in range(400):
        learner.update(still(torch.zeros(256, 3), side[:, None].expand(-1, 2), good.float()))
    value = learner.value({"state": torch.zeros(1, 3)}).item()
    action = learner.policy.act({"state": torch.zeros(1, 3)}, {}, torch.zeros(1, 2))[0]
    assert value == pytest.approx(0.75, abs=0.02)
    assert action.flatten().tolist() == pytest.approx([0.48, 0.48], abs=0.01)


def test_what_cannot_be_learned_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a loss"):
        make_learner(
            "offline.iql.Iql",
            build({"_target_": "embodied.policies.random.Random"}, Policy, spec=SPEC),
            run=RunPlan(1),
        )
