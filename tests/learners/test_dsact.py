"""DSAC-T: targets, bounds, weights and both losses by hand; deviations whose answer is known."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import under
from embodied.learners.acceleration import accelerate
from embodied.learners.critics import Critic
from embodied.learners.off_policy.dsac_t import DsacT, distribution, huber, loss_weights, value_loss
from tests.builders import make_learner, make_policy, still, transitions

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make(spec: Spec = SPEC, **settings: object) -> DsacT:
    policy = make_policy("gaussian.Gaussian", spec, hidden=[32])
    given = {"hidden": [32], "batch_size": 4, **settings}
    return make_learner("off_policy.dsac_t.DsacT", policy, **given)


def raw(sigma: float) -> float:
    """What softplus makes `sigma` of."""
    return math.log(math.expm1(sigma))


@torch.no_grad()
def constant(critic: Critic, values: list[tuple[float, float]]) -> None:
    """Make critic i answer (Q, sigma) = values[i] everywhere."""
    for parameter in critic.ensemble.parameters():
        parameter.zero_()
    answers = torch.tensor([[q, raw(sigma)] for q, sigma in values])
    critic.ensemble.biases[-1].copy_(answers[:, None])


def test_target_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample comes from the critic of the smaller mean; e is cut off at 3; the end is r."""
    learner = make(initial_temperature=0.5)
    constant(learner.target, [(4.0, 1.0), (3.0, 2.0)])
    following = under(transitions(3, SPEC), "next_obs")
    monkeypatch.setattr(
        learner.target_policy,
        "sample",
        lambda obs, noise: (torch.zeros(3, 2), torch.tensor([2.0, -2.0, 1.0])),
    )
    monkeypatch.setattr(torch, "randn_like", lambda like: torch.tensor([1.0, 9.0, 1.0]))
    reward, discount = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.9, 0.5, 0.0])
    mean, sample = learner._backup(reward, discount, following)
    torch.testing.assert_close(mean, torch.tensor([1 + 0.9 * (3 - 1), 2 + 0.5 * (3 + 1), 3.0]))
    by_hand = [1 + 0.9 * (3 + 2 - 1), 2 + 0.5 * (3 + 2 * 3 + 1), 3.0]
    torch.testing.assert_close(sample, torch.tensor(by_hand))
    assert not mean.requires_grad and not sample.requires_grad


def test_bound_and_weight_by_hand() -> None:
    """S starts at the first mean deviation, moves by scale_tau; b = 3 S; w stays within its rim."""
    learner = make(scale_tau=0.1)
    bound, weight = learner._adjustment(torch.tensor([[1.0, 3.0], [4.0, 4.0]]))
    torch.testing.assert_close(bound, torch.tensor([[6.0], [12.0]]))
    torch.testing.assert_close(weight, torch.tensor([[4 / 1.1, 4 / 9.1], [16 / 16.1, 16 / 16.1]]))
    bound, _ = learner._adjustment(torch.tensor([[4.0, 4.0], [4.0, 4.0]]))
    torch.testing.assert_close(bound, 3 * torch.tensor([[2.2], [4.0]]))
    rim = loss_weights(torch.tensor([[0.01, 100.0]]), torch.tensor([[2.0]]), "huber")
    assert rim.tolist() == [[10.0, pytest.approx(0.1)]]
    free = loss_weights(torch.tensor([[0.01]]), torch.tensor([[2.0]]), "squares")
    assert free.item() == pytest.approx(4 / 0.1001)
    bound, weight = make(adjust=False, bound=7.0)._adjustment(torch.tensor([[0.1, 3.0]] * 2))
    assert bound.tolist() == [[7.0], [7.0]]
    torch.testing.assert_close(weight[0], torch.tensor([1 / 0.11, 1 / 9.1]))


def test_both_losses_and_their_slopes_by_hand() -> None:
    q = torch.tensor([[1.0]], requires_grad=True)
    sigma = torch.tensor([[2.0]], requires_grad=True)
    mean, sample, bound = torch.tensor([4.0]), torch.tensor([9.0]), torch.tensor([[5.0]])
    weight = torch.tensor([[0.7]])
    # the sample is 8 away and counts as 5: H(5) = 12.5; H(1 - 4) = 4.5
    loss = value_loss(q, sigma, mean, sample, bound, weight, "huber")
    assert loss.item() == pytest.approx(0.7 * (4.5 + 2 * (4 - 12.5) / 2.1))
    slopes = torch.autograd.grad(loss, (q, sigma))
    assert slopes[0].item() == pytest.approx(0.7 * (1 - 4))
    assert slopes[1].item() == pytest.approx(0.7 * (4 - 12.5) / 2.1)
    # S = 3: S^2 / (sigma^2 + 0.1) for the mean, S^2 / (sigma^3 + 0.1) for the deviation
    weight = torch.tensor([[9 / 4.1]])
    loss = value_loss(q, sigma, mean, sample, bound, weight, "squares")
    assert loss.item() == pytest.approx(9 / 4.1 * 4.5 + 9 / 8.1 * 2 * (4 - 25))
    slopes = torch.autograd.grad(loss, (q, sigma))
    assert slopes[0].item() == pytest.approx(9 / 4.1 * (1 - 4))
    assert slopes[1].item() == pytest.approx(9 / 8.1 * (4 - 25))


def test_huber_by_hand() -> None:
    found = huber(torch.tensor([3.0, -50.0, 60.0]))
    torch.testing.assert_close(found, torch.tensor([4.5, 1250.0, 50 * (60 - 25)]))


def test_the_loss_is_a_mean_over_rows_and_a_sum_over_critics() -> None:
    q = torch.tensor([[1.0, 2.0], [3.0, 3.0]])
    one, target = torch.ones(2, 2), torch.tensor([2.0, 2.0])
    # with bound 0 the second term is sigma (sigma^2 - 0) / (sigma + 0.1) = 1 / 1.1
    loss = value_loss(q, one, target, target, torch.zeros(2, 1), one, "huber")
    assert loss.item() == pytest.approx((0.5 + 0) / 2 + (0.5 + 0.5) / 2 + 2 / 1.1)


def test_switches() -> None:
    learner = make(expected=False, twin=False, adjust=False)
    assert learner.critic.ensemble.n == 1
    assert learner.scale.shape == (1,)
    learner.update(transitions(4, SPEC))
    assert learner.scale.item() == 0  # not used
    # without `expected` the means learn the sample
    for expected, wanted in ((True, 2.0), (False, 5.0)):
        learner = make(expected=expected)
        seen = []
        learner._backup = lambda *_: (torch.full((4,), 2.0), torch.full((4,), 5.0))  # type: ignore[method-assign]
        constant(learner.critic, [(1.0, 1e-3), (1.0, 1e-3)])
        for _ in range(400):
            learner.optims["critic"].param_groups[0]["lr"] = 0.02
            learner.update(transitions(4, SPEC))
            seen.append(
                learner.critic(under(transitions(1, SPEC), "obs"), torch.zeros(1, 2))[0, 0, 0]
            )
        assert seen[-1].item() == pytest.approx(wanted, abs=0.3)


def test_everything_but_the_critic_moves_at_every_second_update() -> None:
    learner = make(delay=2, tau=0.3)
    for update in range(1, 5):
        old = copy.deepcopy([p.detach() for p in learner.target_params])
        weight, actor = learner.critic_params[0].detach().clone(), copy.deepcopy(learner.policy)
        alpha = learner.log_alpha.item()
        metrics = learner.update(transitions(4, SPEC))
        moved = not torch.equal(next(actor.parameters()), next(learner.policy.parameters()))
        assert moved == (update % 2 == 0) == (learner.log_alpha.item() != alpha)
        assert not torch.equal(weight, learner.critic_params[0])
        assert ("actor_loss" in metrics) == (update >= 2)
        for before, now, after in zip(
            old, learner.online_params, learner.target_params, strict=True
        ):
            expected = 0.7 * before + 0.3 * now.detach() if update % 2 == 0 else before
            torch.testing.assert_close(after.detach(), expected)


def learned_sigma(form: str, discount: float, updates: int = 600) -> tuple[float, float]:
    """(Q, sigma) of a world of one state whose reward is N(1, 2^2), `discount` to the next."""
    learner = make(
        batch_size=256,
        form=form,
        hidden=[16],
        critic_lr=5e-3,
        tau=0.05,
        initial_temperature=1e-6,
        temperature_lr=0.0,
    )
    for update in range(updates):
        if update > 0.7 * updates:
            learner.optims["critic"].param_groups[0]["lr"] = 5e-4
        batch = transitions(256, SPEC)
        zeros = torch.zeros(256, 3)
        learner.update(
            {
                **batch,
                "obs/state": zeros,
                "next_obs/state": zeros,
                "reward": 1 + 2 * torch.randn(256),
                "discount": torch.full((256,), discount),
            }
        )
    with torch.no_grad():
        action = torch.rand(500, 2) * 2 - 1
        q, sigma = distribution(learner.critic({"state": torch.zeros(500, 3)}, action))
    return q.mean().item(), sigma.mean().item()


@pytest.mark.parametrize("discount", [0.0, 0.6])
def test_squares_learn_the_deviation_of_the_return(discount: float) -> None:
    """Q = 1 / (1 - d); the deviations of the rewards add up to 2 / sqrt(1 - d^2)."""
    q, sigma = learned_sigma("squares", discount)
    assert q == pytest.approx(1 / (1 - discount), abs=0.2)
    assert sigma == pytest.approx(2 / math.sqrt(1 - discount**2), rel=0.05)


def test_the_huber_form_learns_two_thirds_of_it() -> None:
    """sigma^2 = E min(x^2, 9 sigma^2) / 2 has its root at 0.68 of the deviation of x."""
    q, sigma = learned_sigma("huber", 0.0)
    assert q == pytest.approx(1.0, abs=0.2)
    assert sigma == pytest.approx(2 * 0.68, rel=0.05)


def test_bandit_is_solved() -> None:
    """The best action of 1 - (a - 0.5)^2, when every decision ends the world, is 0.5."""
    learner = make(
        Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1),
        batch_size=64,
        critic_lr=3e-3,
        actor_lr=3e-3,
        temperature_lr=1e-2,
        initial_temperature=0.05,
        target_entropy=-3.0,
    )
    for _ in range(800):
        action, zeros = torch.rand(64, 1) * 2 - 1, torch.zeros(64, 1)
        learner.update(still(zeros, action, 1 - (action[:, 0] - 0.5).square()))
    best = learner.policy.act({"state": torch.zeros(1, 1)}, {}, torch.zeros(1, 1))[0].item()
    assert best == pytest.approx(0.5, abs=0.12)


def test_refusals() -> None:
    policy = build({"_target_": "embodied.policies.deterministic.Deterministic"}, Policy, spec=SPEC)
    with pytest.raises(ConfigError, match="log-prob"):
        make_learner("off_policy.dsac_t.DsacT", policy)
    with pytest.raises(ConfigError, match="cuda_graph=true needs a GPU"):
        accelerate(make(cuda_graph=True)).update(transitions(4, SPEC))
