"""Uni-O4: the gate by hand, cloning that holds apart, PPO that the gate lets through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.learners.learner import RunPlan
from embodied.learners.offline.uni_o4 import ModelGate
from embodied.models.dynamics import Dynamics, Fit, Prediction
from tests.builders import LINE, make_learner, make_policy, still

RATES = {"critic_lr": 3e-3, "value_lr": 3e-3, "tau": 0.1, "hidden": [32]}


class Line(Dynamics):
    """s' = s + a, which ends beyond 2."""

    spec, noise_size = LINE, 1

    def fit(self, transitions: Tensors, progress: Any = None) -> Fit:
        raise NotImplementedError

    def step(self, obs: Tensors, action: Tensor, noise: Tensor) -> Prediction:
        state = obs["state"] + action
        return Prediction({"state": state}, state[:, 0], state[:, 0] > 2)


def policy_of(mean: float) -> Any:
    """A policy with one mean action everywhere."""
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", LINE, hidden=[8], zero_head=True)
    policy.net[-1].bias.data.fill_(mean)
    return policy


def state(obs: Tensors, action: Tensor) -> Tensor:
    return obs["state"][:, 0] + 10 * action[:, 0]


def test_scores_are_mean_values_along_the_roll_outs() -> None:
    """From 0 by 1: states 0, 1, 2, then the end; from -3: -3, -2, -1, 0."""
    starts = {"state": torch.tensor([[0.0], [-3.0]])}
    gate = ModelGate(starts, state, Line(), 3)
    expected = [10 + (0 + 1 + 2) / 3, 10 + (-3 - 2 - 1 + 0) / 4]
    assert gate.scores(policy_of(1.0)).tolist() == pytest.approx(expected)
    assert ModelGate(starts, state, None, 3).scores(policy_of(0.5)).tolist() == [5.0, 2.0]


def test_the_gate_asks_for_more_than_noise() -> None:
    gate = ModelGate({"state": torch.zeros(4, 1)}, state)
    than = torch.tensor([5.0, -5.0, 0.0, 1.0])
    assert gate.better(than + torch.tensor([1.0, 0.9, 1.1, 1.0]), than)
    assert not gate.better(than, than)
    assert not gate.better(than + torch.tensor([2.0, -1.0, -1.0, 1.0]), than)  # 0.25, error 0.75


def make(updates: int, **settings: Any) -> Any:
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", LINE, hidden=[16], log_std=-0.5)
    given = {"batch_size": 128, "members": 2, "lr": 3e-3, "values": RATES, **settings}
    return make_learner("offline.uni_o4.UniO4", policy, run=RunPlan(updates), **given)


def bandit(n: int) -> Tensors:
    """One state, all actions, the reward is the action."""
    action = torch.rand(n, 1) * 2 - 1
    return still(torch.zeros(n, 1), action, action[:, 0])


def test_the_cloning_loss_by_hand() -> None:
    learner = make(10, apart=0.5)
    batch = bandit(16)
    obs = {"state": batch["obs/state"]}
    log_prob = torch.stack([m.log_prob(obs, batch["action"]) for m in learner.members])
    best = torch.maximum(log_prob[0], log_prob[1])
    expected = -(1.5 * (log_prob[0] + log_prob[1]) - 0.5 * 2 * best).mean()
    torch.testing.assert_close(learner._clone(batch), expected.detach())


def test_it_improves_on_the_clone_and_deploys_the_best() -> None:
    torch.manual_seed(0)
    learner = make(500, clone=0.6, gate_every=20, clip=0.5)
    learner.fit(bandit(600))
    means: list[float] = []
    for number in range(500):
        metrics = learner.update(bandit(128))
        if number in (299, 499):
            means.append(learner.policy({"state": torch.zeros(1, 1)}).item())
    assert abs(means[0]) < 0.15 and means[1] > means[0] + 0.2
    assert metrics["accepted"] >= 2
    scores = learner.best.mean(1)
    kept = learner.kept[int(scores.argmax())]
    assert all(map(torch.equal, learner.policy.parameters(), kept.parameters()))


def test_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="improves on a dataset"):
        make(10, clone=0.0).update(bandit(8))
    with pytest.raises(ConfigError, match="no effect"):
        make(10, values={"batch_size": 4})
