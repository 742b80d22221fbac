"""Cal-QL: the log sum, its floor and densities by hand; pessimism that calibration bounds."""

from __future__ import annotations

import math

import pytest
import torch

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.off_policy.sac import Sac
from embodied.learners.offline.calql import CalQl, calibrated, conservative_gap
from tests.builders import make_learner, make_policy, transitions

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make(
    target: str = "offline.calql.CalQl", std: float = math.exp(-1.5), **settings: object
) -> Sac:
    """With a policy that starts at the deviation `std` before squashing."""
    log_std = [math.log(std) - 1, math.log(std) + 1]
    policy = make_policy("gaussian.Gaussian", SPEC, hidden=[32], log_std=log_std)
    return make_learner(target, policy, **{"hidden": [32], "batch_size": 4, **settings})


def batch_of(n: int) -> Tensors:
    torch.manual_seed(1)
    return {**transitions(n, SPEC), "returns": torch.arange(float(n)) * 10}


def test_the_floor_by_hand() -> None:
    """One critic, two rows, one action of each kind: here, there, uniform."""
    q = torch.tensor([[[1.0, 5.0, 1.0], [2.0, -3.0, 0.0]]])
    log_prob = torch.tensor([[0.5, 1.0, -1.0], [0.0, 0.0, -1.0]])
    floor = torch.tensor([3.0, -1.0])
    # The uniform action's value has no floor.
    expected = [[[3 - 0.5, 5 - 1.0, 1 + 1.0], [2.0, -1.0, 0 + 1.0]]]
    assert calibrated(q, log_prob, floor).tolist() == expected
    assert calibrated(q, log_prob, None).tolist() == [[[0.5, 4.0, 2.0], [2.0, -3.0, 1.0]]]


def test_the_gap_by_hand() -> None:
    values = torch.tensor([[[0.0, 0.0], [1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]])
    q = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    # log 2 + (0 - 1 + 1 - 2) / 2, and log 2 + (2 - 0 + 2 - 4) / 2
    assert conservative_gap(values, q).item() == pytest.approx(2 * math.log(2) - 1)


def test_below_the_floor_nothing_is_pushed() -> None:
    q = torch.tensor([[[1.0, 5.0, 1.0]]], requires_grad=True)
    calibrated(q, torch.zeros(1, 3), torch.tensor([3.0])).logsumexp(2).sum().backward()
    assert q.grad is not None
    slopes = torch.softmax(torch.tensor([3.0, 5.0, 1.0]), 0).tolist()
    assert q.grad.flatten().tolist() == pytest.approx([0.0, slopes[1], slopes[2]])


def test_where_actions_come_from_and_how_dense_they_are() -> None:
    learner = make(samples=3)
    assert isinstance(learner, CalQl)
    batch = batch_of(4)
    obs, following = ({"state": batch[f"{kind}/state"]} for kind in ("obs", "next_obs"))
    actions, log_prob = learner._elsewhere(obs, following)
    assert actions.shape == (4, 9, 2) and log_prob.shape == (4, 9)
    for row in range(4):
        for first, seen in ((0, obs), (3, following)):
            given = {"state": seen["state"][row].expand(3, 3)}
            density = learner.policy.log_prob(given, actions[row, first : first + 3])
            torch.testing.assert_close(
                log_prob[row, first : first + 3], density, rtol=1e-3, atol=1e-3
            )
    assert torch.equal(log_prob[:, 6:], torch.full((4, 3), math.log(0.25)))
    assert actions[:, 6:].abs().max() <= 1


def test_the_log_sum_estimates_an_integral() -> None:
    """For Q = 0 the log sum less log(3 K) is log integral 1 = log 4 over [-1, 1]^2."""
    learner = make(samples=4000, std=0.9)  # nearly uniform: every action is drawn
    assert isinstance(learner, CalQl)
    obs = {"state": torch.zeros(1, 3)}
    _, log_prob = learner._elsewhere(obs, obs)
    sums = calibrated(torch.zeros(1, 1, 12_000), log_prob, None).logsumexp(2)
    assert sums.item() - math.log(12_000) == pytest.approx(math.log(4), abs=0.1)


def test_without_the_term_it_is_sac() -> None:
    one = make(conservative=0.0, entropy_in_backup=True)._critic_loss(batch_of(4))[0]
    torch.manual_seed(1)
    batch = batch_of(4)
    other = make("off_policy.sac.Sac")
    torch.manual_seed(1)
    batch = batch_of(4)
    assert one.item() == pytest.approx(other._critic_loss(batch)[0].item(), rel=1e-5)


def test_pessimism_is_bounded_by_the_returns_seen() -> None:
    """One state and the policy far from the data's action 0.8, whose return is 1: CQL pushes the
    policy's value down without end, calibrated it stays near."""
    values = []
    for calibrate in (True, False):
        learner = make(
            calibrate=calibrate, samples=4, conservative=1.0, critic_lr=2e-2, actor_lr=1e-30
        )
        for _ in range(150):
            learner.update(
                {
                    "obs/state": torch.zeros(16, 3),
                    "action": torch.full((16, 2), 0.8) + 0.02 * torch.randn(16, 2),
                    "reward": torch.ones(16),
                    "discount": torch.zeros(16),
                    "next_obs/state": torch.zeros(16, 3),
                    "returns": torch.ones(16),
                }
            )
        obs = {"state": torch.zeros(200, 3)}
        action, _ = learner.policy.sample(obs, learner.policy.sample_noise(200, True))
        values.append(learner.critic(obs, action).mean().item())
    assert values[0] > -20 > -40 > values[1]
