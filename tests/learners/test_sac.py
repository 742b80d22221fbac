"""SAC: targets, subsets, slices and temperature by hand; problems whose answer is known."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import actor_loss, temperature_gradient
from embodied.learners.off_policy.sac import Sac, critic_loss
from embodied.nn.networks import ACTIVATIONS, Ensemble
from embodied.nn.optim import Adam
from tests.builders import SPEC, make_learner, make_policy, transitions


def make(spec: Spec = SPEC, zero_head: bool = False, **settings: object) -> Sac:
    policy = make_policy("gaussian.Gaussian", spec, hidden=[32], zero_head=zero_head)
    given = {"hidden": [32], "batch_size": 4, **settings}
    return make_learner("off_policy.sac.Sac", policy, **given)


def batch_of(n: int, spec: Spec = SPEC) -> Tensors:
    return transitions(n, spec, shift=0.1)


@torch.no_grad()
def constant_targets(learner: Sac, values: list[float]) -> None:
    """Make target critic i answer values[i] everywhere."""
    for parameter in learner.target.ensemble.parameters():
        parameter.zero_()
    learner.target.ensemble.biases[-1].copy_(torch.tensor(values).view(-1, 1, 1))


def test_target_without_entropy() -> None:
    learner = make(entropy_in_backup=False)
    constant_targets(learner, [4.0, 3.0])
    following = under(batch_of(3), "next_obs")
    reward = torch.tensor([1.0, 2.0, 5.0])
    discount = torch.tensor([0.0, 0.9, 0.81])  # the world ended; the clock did; two steps passed
    backup = learner._backup(reward, discount, following)
    torch.testing.assert_close(backup, torch.tensor([1.0, 2 + 0.9 * 3, 5 + 0.81 * 3]))


def test_target_with_entropy() -> None:
    learner = make(zero_head=True, initial_temperature=0.2)
    constant_targets(learner, [4.0, 3.0])
    following = under(batch_of(1), "next_obs")
    torch.manual_seed(5)
    noise = torch.randn(1, 2)
    torch.manual_seed(5)
    backup = learner._backup(torch.tensor([1.0]), torch.tensor([0.9]), following)
    # A head of zeros means N(0, exp(-1.5)), half-way between the bounds -5 and 2 of log std.
    log_prob = 0.0
    for e in noise[0].tolist():
        u = math.exp(-1.5) * e
        log_prob += -0.5 * e * e + 1.5 - 0.5 * math.log(2 * math.pi)
        log_prob -= math.log(1 - math.tanh(u) ** 2)
    assert backup.item() == pytest.approx(1 + 0.9 * (3 - 0.2 * log_prob), rel=1e-4)


@pytest.mark.parametrize(("subset", "low"), [(1, {1, 2, 3}), (2, {1, 2}), (3, {1})])
def test_target_takes_the_minimum_of_a_random_subset(subset: int, low: set[int]) -> None:
    learner = make(critics=3, subset=subset, entropy_in_backup=False)
    constant_targets(learner, [3.0, 1.0, 2.0])
    following, one = under(batch_of(1), "next_obs"), torch.ones(1)
    seen = [round(learner._backup(0 * one, one, following).item()) for _ in range(200)]
    assert set(seen) == low
    expected = {1: 1 / 3, 2: 2 / 3, 3: 1.0}[subset]  # how often critic 1 is among those drawn
    assert abs(seen.count(1) / 200 - expected) < 0.12


def test_losses_by_hand() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    # ((1-2)^2 + (2-4)^2) / 2 + ((3-2)^2 + (5-4)^2) / 2
    assert critic_loss(q, torch.tensor([2.0, 4.0])).item() == 2.5 + 1.0
    value, log_prob = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 3.0])
    assert actor_loss(value, log_prob, torch.tensor(0.5)).item() == 0.5 - 1.5
    assert temperature_gradient(log_prob, -2.0).item() == 1.0  # -(mean 1 - 2): entropy is too low


def test_temperature_moves_towards_the_target_entropy() -> None:
    for target, sign in ((-50.0, -1), (50.0, 1)):
        learner = make(target_entropy=target, temperature_lr=0.1)
        learner.update(batch_of(4))
        assert math.copysign(1, learner.log_alpha.item()) == sign


def test_every_critic_step_sees_its_own_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(utd=3, critics=5, tau=0.3)
    assert learner.batch_size == 12
    seen, weights, averages = [], [], copy.deepcopy(learner.target_params)
    critic_step, actor_step = learner.critic_step, learner.soft_actor_step

    def critic(batch: Tensors, tau: float) -> Tensors:
        seen.append(batch["reward"].tolist())
        metrics = critic_step(batch, tau)
        weights.append([weight.detach().clone() for weight in learner.critic_params])
        return metrics

    def actor(batch: Tensors) -> Tensors:
        seen.append(batch["reward"].tolist())
        return actor_step(batch)

    monkeypatch.setattr(learner, "critic_step", critic)
    monkeypatch.setattr(learner, "soft_actor_step", actor)
    learner.update(batch_of(12))
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [8, 9, 10, 11]]
    for after in weights:  # Polyak after every critic step
        averages = [
            0.7 * old.detach() + 0.3 * new for old, new in zip(averages, after, strict=True)
        ]
    for expected, average in zip(averages, learner.target_params, strict=True):
        torch.testing.assert_close(average.detach(), expected)


def test_actor_objective() -> None:
    """With critics Q1 = a and Q2 = -3 a the mean falls with a; the minimum is best at a = 0."""
    spec = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
    for objective, expected in (("mean", -1.0), ("min", 0.0)):
        rates = {"initial_temperature": 1e-6, "actor_lr": 0.02, "temperature_lr": 0.0}
        learner = make(spec, hidden=[2], actor_objective=objective, **rates)
        with torch.no_grad():
            ensemble = learner.critic.ensemble
            for parameter in ensemble.parameters():
                parameter.zero_()
            ensemble.weights[0][:, 1] = torch.tensor([1.0, -1.0])  # relu(a), relu(-a)
            slopes = torch.tensor([1.0, -3.0])
            ensemble.weights[1][:, :, 0] = slopes[:, None] * torch.tensor([1.0, -1.0])
        for _ in range(150):
            learner.soft_actor_step({"obs/state": torch.zeros(64, 1), "reward": torch.zeros(64)})
        obs = {"state": torch.zeros(1, 1)}
        action = learner.policy.act(obs, {}, torch.zeros(1, 1))[0].item()
        assert action == pytest.approx(expected, abs=0.15)


def test_critics_see_what_the_policy_may_not() -> None:
    spec = SPEC.with_obs(**{"critic/mass": Leaf((1,))})
    learner = make(spec)
    learner.update(batch_of(4, spec))
    obs = {"state": torch.zeros(1, 3), "critic/mass": torch.zeros(1, 1)}
    heavy = obs | {"critic/mass": torch.ones(1, 1)}
    action, noise = torch.zeros(1, 2), torch.zeros(1, 2)
    assert not torch.equal(learner.critic(obs, action), learner.critic(heavy, action))
    same = [learner.policy.act(seen, {}, noise)[0] for seen in (obs, heavy)]
    assert torch.equal(*same)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"subset=3 is not in 1\.\.2"):
        make(subset=3)
    spec = Spec({"state": Leaf((3,))}, Leaf((), "int64", 0, 3), dt=0.1)
    with pytest.raises(ConfigError, match="continuous actions"):
        make(spec)


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu"])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("out", [1, 3])
def test_ensemble_is_its_members(activation: str, layer_norm: bool, out: int) -> None:
    """Values and slopes of torch's ordinary layers."""
    torch.manual_seed(0)
    ensemble = Ensemble(3, 4, (8, 6), out, layer_norm, activation)
    if layer_norm:
        for parameter in [*ensemble.scales, *ensemble.shifts]:
            torch.nn.init.normal_(parameter)
    x, parts = torch.randn(5, 4, requires_grad=True), []
    for which in range(3):
        y = x
        for i in range(3):
            y = y @ ensemble.weights[i][which] + ensemble.biases[i][which]
            if i < 2 and layer_norm:
                scale, shift = ensemble.scales[i][which, 0], ensemble.shifts[i][which, 0]
                y = torch.nn.functional.layer_norm(y, y.shape[-1:], scale, shift)
            y = ACTIVATIONS[activation]()(y) if i < 2 else y
        parts.append(y)
    found, each = ensemble(x), torch.stack(parts)
    torch.testing.assert_close(found, each)
    torch.testing.assert_close(ensemble(x, 2), each[:2])
    inputs = [x, *ensemble.parameters()]
    weights = torch.randn_like(found)
    grads = torch.autograd.grad((found * weights).sum(), inputs)
    expected = torch.autograd.grad((each * weights).sum(), inputs)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_adam_is_torchs() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    here, there = Adam(ours, 0.01), torch.optim.Adam(theirs, 0.01, fused=True)
    for step in range(6):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        here.step()
        there.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
        if step == 2:  # its own state, then torch's
            here.load_state_dict(copy.deepcopy(here.state_dict()))
        if step == 4:
            here.load_state_dict(
                here.state_dict() | copy.deepcopy({"state": there.state_dict()["state"]})
            )
    with pytest.raises(RuntimeError, match="without a gradient"):
        here.step()


def test_adamw_is_torchs_also_for_a_loss_that_leaves_a_parameter_out() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    here = Adam(ours, 0.01, weight_decay=0.1, decoupled=True, local=True)
    there = torch.optim.AdamW(theirs, 0.01, weight_decay=0.1, fused=True)
    for _ in range(4):
        for a, b in list(zip(ours, theirs, strict=True))[::2]:
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        here.step()
        there.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_critics_learn_alone_first() -> None:
    """Policy and temperature from the fourth update on, also after a save in between."""
    learner = make(actor_start=3)
    batches = [batch_of(4) for _ in range(6)]
    moved: list[bool] = []
    for number, batch in enumerate(batches):
        if number == 2:
            fresh = make(actor_start=3)
            fresh.set_state(copy.deepcopy(learner.get_state()))
            learner = fresh
        before = [p.detach().clone() for p in (*learner.actor_params, learner.log_alpha)]
        critic = learner.critic_params[0].detach().clone()
        assert ("actor_loss" in learner.update(batch)) == (number >= 3)
        assert not torch.equal(critic, learner.critic_params[0])
        after = (*learner.actor_params, learner.log_alpha)
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    assert moved == [False] * 3 + [True] * 3
