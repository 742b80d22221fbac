"""f-DVL, ReCOIL, CPL and Uni-O4: what they converge to, and their losses by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import RunPlan
from embodied.learners.offline.cpl import contrastive_loss
from embodied.learners.offline.f_dvl import Divergence, dual_loss, reverse_kl_loss
from embodied.learners.offline.iql import expectile_loss
from embodied.learners.offline.uni_o4 import ModelGate
from embodied.models.dynamics import Dynamics, Fit, Prediction
from tests.builders import LINE, SPEC, make_learner, make_policy, still, transitions

ONE = Spec({"state": Leaf((3,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(kind: str, **settings: Any) -> Any:
    policy = make_policy("deterministic.Deterministic", ONE, hidden=[32])
    return make_learner(f"offline.{kind}", policy, run=RunPlan(1000), **settings)


def least(loss: Callable[[Tensor], Tensor], q: Tensor) -> float:
    """The V at which the loss of Q - V is least, by bisection of its slope."""
    low, high = q.min().item() - 20, q.max().item() + 20
    for _ in range(60):
        value = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        loss(q - value).backward()
        assert value.grad is not None
        low, high = (value.item(), high) if value.grad < 0 else (low, value.item())
    return low


def test_the_four_fixed_points() -> None:
    torch.manual_seed(0)
    q = 3 * torch.randn(20_001, dtype=torch.float64)
    quantile = q.quantile((2 * 0.8 - 1) / 0.8).item()
    assert least(lambda gap: dual_loss(gap, "tv", 0.8), q) == pytest.approx(quantile, abs=1e-2)
    soft = 2 * (q / 2).exp().mean().log().item()
    assert least(lambda gap: reverse_kl_loss(gap, 2.0, 50.0), q) == pytest.approx(soft, abs=1e-2)
    value = least(lambda gap: dual_loss(gap, "chi2", 0.8), q)
    assert (1 + (q - value) / 2).clamp(min=0).mean().item() == pytest.approx(0.25, abs=1e-2)
    assert value == pytest.approx(1.26 * 3, rel=0.03)  # by quadrature
    level = least(lambda gap: expectile_loss(gap, 0.9), q)
    above, below = (q - level).clamp(min=0).mean(), (level - q).clamp(min=0).mean()
    assert (0.9 * above).item() == pytest.approx((0.1 * below).item(), rel=1e-2)


def test_the_authors_chi2_rises_again_below_minus_four() -> None:
    gap = torch.tensor([-6.0, -3.0, -1.0, 2.0])
    cases: list[tuple[Divergence, list[float]]] = [
        ("chi2", [-1, -1, -0.75, 3]),
        ("chi2_reference", [3, 0, 0, 3]),
    ]
    for divergence, conjugate in cases:
        expected = 0.8 * torch.tensor(conjugate) - 0.2 * gap
        found = dual_loss(gap, divergence, 0.8)
        assert found.item() == pytest.approx(expected.mean().item())


@pytest.mark.parametrize("normalize", [True, False])
def test_normalised_it_does_not_depend_on_the_scale(normalize: bool) -> None:
    best, value = torch.arange(9.0), torch.ones(9)
    learner = make("f_dvl.FDvl", normalize=normalize)
    one, other = learner.value_loss(best, value), learner.value_loss(100 * best, 100 * value)
    assert math.isclose(one.item(), other.item(), rel_tol=1e-4) == normalize


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (
            lambda: make("f_dvl.FDvl", divergence="tv", lam=0.4),
            r"above 0\.5 and at most 1 with divergence=tv",
        ),
        (
            lambda: make("recoil.Recoil").fit(transitions(4, ONE) | {"source": torch.zeros(4)}),
            r"demos=\[EXPERT,OTHERS\]",
        ),
        (lambda: make_cpl(chunk=2), "single steps"),
        (lambda: make_uni_o4(10, clone=0.0).update(bandit(8)), "improves on a dataset"),
        (lambda: make_uni_o4(10, values={"batch_size": 4}), "no effect"),
    ],
)
def test_what_does_not_fit_is_refused(refused: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        refused()


def test_the_target_and_the_level_by_hand() -> None:
    learner = make("recoil.Recoil", hidden=(), ended=0.5, gamma=0.9, level=20.0)
    batch = transitions(4, ONE) | {"source": torch.tensor([0, 0, 1, 1])}
    batch["discount"] = torch.tensor([0.9, 0.81, 0.9, 0.0])
    for parameter in learner.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.constant_(learner.value.net.biases[-1], 5.0)
    losses, _ = learner._loss(batch)
    # -20 (1 - d) + 5 d; after the end -20 (1 - 0.9) + 0.9 * 0.5 * 20
    target = torch.tensor([-2 + 4.5, -3.8 + 4.05, -2 + 4.5, -2 + 9.0])
    assert losses[2].item() == pytest.approx(2 * (target.square().mean().item() + 20**2), rel=1e-5)


def make_cpl(chunk: int = 1, updates: int = 0, **settings: Any) -> Any:
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[32], chunk=chunk)
    return make_learner("offline.cpl.Cpl", policy, RunPlan(updates), segment=4, **settings)


def pairs(n: int) -> Tensors:
    """Segments of one state; preferred is the one with the larger actions."""
    action = torch.rand(n, 2, 4, 2) - 0.5
    total = action.sum((2, 3))
    label = (total[:, 1] > total[:, 0]).float()
    return {"obs/state": torch.zeros(n, 2, 4, 3), "action": action, "label": label}


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (1.0, math.log1p(math.exp(3 - 0.5))),
        (0.0, math.log1p(math.exp(1 - 1.5))),
        (0.5, (math.log1p(math.exp(2.5)) + math.log1p(math.exp(-0.5))) / 2),
    ],
)
def test_the_contrastive_loss_by_hand(label: float, expected: float) -> None:
    first, second = torch.tensor([-1.0]), torch.tensor([-3.0])
    loss = contrastive_loss(first, second, torch.tensor([label]), 0.5)
    assert loss.item() == pytest.approx(expected)


def test_the_score_is_the_squared_distance() -> None:
    learner = make_cpl()
    batch = pairs(5)
    mean = learner.policy({"state": torch.zeros(1, 3)})
    expected = -(batch["action"] - mean).square().sum(3)
    torch.testing.assert_close(learner.log_prob(batch), expected)


def test_first_it_clones_then_it_follows_the_preference() -> None:
    """Actions in [-0.5, 0.5]: cloned, their mean; preferred are those near 0.5."""
    learner = make_cpl(updates=500, clone=0.4, lr=3e-3, bias=0.9, alpha=1.0)
    means: list[float] = []
    for number in range(500):
        learner.update(pairs(32))
        if number in (199, 499):
            means.append(learner.policy({"state": torch.zeros(1, 3)}).mean().item())
    assert abs(means[0]) < 0.1 and means[1] > 0.3
    assert learner.update(pairs(256))["agreement"] > 0.9


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


def make_uni_o4(updates: int, **settings: Any) -> Any:
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", LINE, hidden=[16], log_std=-0.5)
    given = {"batch_size": 128, "members": 2, "lr": 3e-3, "values": RATES, **settings}
    return make_learner("offline.uni_o4.UniO4", policy, run=RunPlan(updates), **given)


def bandit(n: int) -> Tensors:
    """One state, all actions, the reward is the action."""
    action = torch.rand(n, 1) * 2 - 1
    return still(torch.zeros(n, 1), action, action[:, 0])


def test_the_cloning_loss_by_hand() -> None:
    learner = make_uni_o4(10, apart=0.5)
    batch = bandit(16)
    obs = {"state": batch["obs/state"]}
    log_prob = torch.stack([m.log_prob(obs, batch["action"]) for m in learner.members])
    best = torch.maximum(log_prob[0], log_prob[1])
    expected = -(1.5 * (log_prob[0] + log_prob[1]) - 0.5 * 2 * best).mean()
    torch.testing.assert_close(learner._clone(batch), expected.detach())


def test_it_improves_on_the_clone_and_deploys_the_best() -> None:
    torch.manual_seed(0)
    learner = make_uni_o4(500, clone=0.6, gate_every=20, clip=0.5)
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
