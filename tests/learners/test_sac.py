"""SAC: targets, subsets, slices and temperature by hand; problems whose answer is known."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.actor_critic import actor_loss, temperature_gradient
from embodied.learners.off_policy.sac import Sac, critic_loss
from embodied.nn.networks import ACTIVATIONS, Ensemble
from embodied.nn.optim import Adam
from tests.builders import LINE, SPEC, make_learner, make_policy, transitions
from tests.learners.parts import constant, copies, moved, require_average, slopes


def make(spec: Spec = SPEC, zero_head: bool = False, **settings: object) -> Sac:
    policy = make_policy("gaussian.Gaussian", spec, hidden=[32], zero_head=zero_head)
    given = {"hidden": [32], "batch_size": 4, **settings}
    return make_learner("off_policy.sac.Sac", policy, **given)


FOLLOWING = {"state": torch.zeros(3, 3)}


def test_target_with_entropy() -> None:
    """A head of zeros means N(0, exp(-1.5)), half-way between the bounds -5 and 2 of log std."""
    learner = make(zero_head=True, initial_temperature=0.2)
    constant(learner.target.ensemble, [4.0, 3.0])
    torch.manual_seed(5)
    e, reward = torch.randn(3, 2), torch.tensor([1.0, 2.0, 5.0])
    discount = torch.tensor([0.0, 0.9, 0.81])  # the world ended; the clock did; two steps passed
    torch.manual_seed(5)
    backup = learner._backup(reward, discount, FOLLOWING)
    normal = -0.5 * e.square() + 1.5 - 0.5 * math.log(2 * math.pi)
    log_prob = (normal - (1 - torch.tanh(math.exp(-1.5) * e).square()).log()).sum(1)
    torch.testing.assert_close(backup, reward + discount * (3 - 0.2 * log_prob), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("subset", "low", "share"), [(1, {1, 2, 3}, 1 / 3), (2, {1, 2}, 2 / 3), (3, {1}, 1.0)]
)
def test_target_takes_the_minimum_of_a_random_subset(
    subset: int, low: set[int], share: float
) -> None:
    """`share`: how often critic 1 is among those drawn."""
    learner = make(critics=3, subset=subset, entropy_in_backup=False)
    constant(learner.target.ensemble, [3.0, 1.0, 2.0])
    one = torch.ones(3)
    seen = [round(learner._backup(0 * one, one, FOLLOWING)[0].item()) for _ in range(200)]
    assert set(seen) == low
    assert seen.count(1) / 200 == pytest.approx(share, abs=0.12)


def test_losses_by_hand() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    # ((1-2)^2 + (2-4)^2) / 2 + ((3-2)^2 + (5-4)^2) / 2
    assert critic_loss(q, torch.tensor([2.0, 4.0])).item() == 2.5 + 1.0
    value, log_prob = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 3.0])
    assert actor_loss(value, log_prob, torch.tensor(0.5)).item() == 0.5 - 1.5
    assert temperature_gradient(log_prob, -2.0).item() == 1.0  # -(mean 1 - 2): entropy is too low


@pytest.mark.parametrize(("target", "sign"), [(-50.0, -1), (50.0, 1)])
def test_temperature_moves_towards_the_target_entropy(target: float, sign: int) -> None:
    learner = make(target_entropy=target, temperature_lr=0.1)
    learner.update(transitions(4, SPEC))
    assert math.copysign(1, learner.log_alpha.item()) == sign


def test_every_critic_step_sees_its_own_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(utd=3, critics=5, tau=0.3)
    assert learner.batch_size == 12
    seen: list[list[float]] = []
    critic_step, actor_step = learner.critic_step, learner.soft_actor_step

    def critic(batch: Tensors, tau: float) -> Tensors:
        seen.append(batch["reward"].tolist())
        old = copies(learner.target_params)
        metrics = critic_step(batch, tau)
        require_average(learner.target_params, old, learner.critic_params, 0.3)
        return metrics

    def actor(batch: Tensors) -> Tensors:
        seen.append(batch["reward"].tolist())
        return actor_step(batch)

    monkeypatch.setattr(learner, "critic_step", critic)
    monkeypatch.setattr(learner, "soft_actor_step", actor)
    learner.update(transitions(12, SPEC))
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [8, 9, 10, 11]]


@pytest.mark.parametrize(("objective", "expected"), [("mean", -1.0), ("min", 0.0)])
def test_actor_objective(objective: str, expected: float) -> None:
    """With critics Q1 = a and Q2 = -3 a the mean falls with a; the minimum is best at a = 0."""
    rates = {"initial_temperature": 1e-6, "actor_lr": 0.02, "temperature_lr": 0.0}
    learner = make(LINE, hidden=[], actor_objective=objective, **rates)
    slopes(learner.critic, [1.0, -3.0])
    for _ in range(150):
        learner.soft_actor_step({"obs/state": torch.zeros(64, 1), "reward": torch.zeros(64)})
    action = learner.policy.act({"state": torch.zeros(1, 1)}, {}, torch.zeros(1, 1))[0].item()
    assert action == pytest.approx(expected, abs=0.15)


def test_critics_see_what_the_policy_may_not() -> None:
    learner = make(SPEC.with_obs(**{"critic/mass": Leaf((1,))}))
    obs, noise = {"state": torch.zeros(1, 3)}, torch.zeros(1, 2)
    light, heavy = ({**obs, "critic/mass": torch.full((1, 1), mass)} for mass in (0.0, 1.0))
    assert not torch.equal(learner.critic(light, noise), learner.critic(heavy, noise))
    acted = [learner.policy.act(seen, {}, noise)[0] for seen in (light, heavy)]
    assert torch.equal(*acted)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"subset=3 is not in 1\.\.2"):
        make(subset=3)
    with pytest.raises(ConfigError, match="continuous actions"):
        make(SPEC.with_act(Leaf((), "int64", 0, 3)))


@pytest.mark.parametrize(
    ("activation", "layer_norm", "out"),
    [("relu", False, 1), ("tanh", True, 1), ("silu", True, 3), ("relu", False, 3)],
)
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
    inputs, weights = [x, *ensemble.parameters()], torch.randn_like(found)
    for one, other in zip(
        *(torch.autograd.grad((y * weights).sum(), inputs) for y in (found, each)), strict=True
    ):
        torch.testing.assert_close(one, other)


ADAMS = {
    "adam": ({}, torch.optim.Adam),
    "L2": ({"weight_decay": 0.1}, torch.optim.Adam),
    "adamw": ({"weight_decay": 0.1, "decoupled": True, "local": True}, torch.optim.AdamW),
}


@pytest.mark.parametrize("name", ADAMS)
def test_adam_is_torchs(name: str) -> None:
    """Also after a state of its own and one of torch's was loaded; and, where each parameter counts
    its own steps, for a loss that leaves a parameter out."""
    settings, kind = ADAMS[name]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    here = Adam(ours, 0.01, **settings)
    decay = settings.get("weight_decay", 0.0)
    there = kind(theirs, 0.01, weight_decay=decay, fused=True)
    every = 2 if "local" in settings else 1
    for step in range(6):
        for a, b in list(zip(ours, theirs, strict=True))[::every]:
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        here.step()
        there.step()
        assert not any(moved(ours, theirs)), step
        if step == 2 and every == 1:
            here.load_state_dict(copy.deepcopy(here.state_dict()))
        if step == 4 and every == 1:
            kept = copy.deepcopy({"state": there.state_dict()["state"]})
            here.load_state_dict(here.state_dict() | kept)
    if every == 1:
        with pytest.raises(RuntimeError, match="without a gradient"):
            here.step()


def test_critics_learn_alone_first() -> None:
    """Policy and temperature from the fourth update on, also after a save in between."""
    learner = make(actor_start=3)
    acted: list[bool] = []
    for number in range(6):
        if number == 2:
            state = copy.deepcopy(learner.get_state())
            learner = make(actor_start=3)
            learner.set_state(state)
        actor = [*learner.actor_params, learner.log_alpha]
        before, critic = copies(actor), copies(learner.critic_params)
        assert ("actor_loss" in learner.update(transitions(4, SPEC))) == (number >= 3)
        assert all(moved(critic, learner.critic_params))
        acted.append(any(moved(before, actor)))
    assert acted == [False] * 3 + [True] * 3
