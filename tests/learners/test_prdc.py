"""PRDC: what is nearest, what holds the policy, and what that lets it do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.learners.offline.prdc import nearest, tree_of
from tests.builders import LINE, SPEC, make_learner, make_policy, still, transitions
from tests.learners.bandit import slopes

TD3_BC = {"layer_norm": False, "critic_bc": 0.0, "distance": "mean", "value": "first"}


def make(kind: str, spec: Spec, **settings: Any) -> Any:
    policy = make_policy("deterministic.Deterministic", spec, hidden=[32])
    return make_learner(f"offline.{kind}", policy, hidden=(), **TD3_BC, **settings)


def test_the_nearest_by_tree_and_by_product_is_that_of_all_distances() -> None:
    torch.manual_seed(0)
    points, query = torch.randn(500, 5), torch.randn(40, 5)
    query[0] = points[123]
    by_hand = (query[:, None] - points).norm(dim=2).argmin(1)
    assert by_hand[0] == 123
    for tree in (tree_of(points), None):
        assert torch.equal(nearest(query, points, tree), by_hand)


def test_states_are_standardised_and_weighed() -> None:
    """Two transitions, whose states are standardised to -1 and 1 in every element."""
    learner = make("prdc.Prdc", LINE, beta=0.5)
    rows = still(torch.tensor([[3.0], [7.0]]), torch.tensor([[0.9], [-0.9]]), torch.zeros(2))
    learner.fit(rows)
    assert learner.points.tolist() == [[-0.5, pytest.approx(0.9)], [0.5, pytest.approx(-0.9)]]
    # At the first state (0.9 - a)^2 against 1 + (-0.9 - a)^2: equal at a = -1 / 3.6.
    for action, taken in ((-0.2, 0.9), (-0.3, -0.9)):
        given = torch.tensor([[action]])
        penalty = learner.actor_penalty({"obs/state": torch.tensor([[3.0]])}, given)
        assert penalty.item() == pytest.approx(0.01 * (action - taken) ** 2, rel=1e-4)


def test_a_large_beta_is_td3_bc() -> None:
    torch.manual_seed(1)
    rows = transitions(64, SPEC)
    prdc = make("prdc.Prdc", SPEC, beta=1e3)
    other = make("rebrac.Rebrac", SPEC)
    other.load_state_dict(prdc.state_dict())
    for learner in (prdc, other):
        learner.fit(rows)
        learner._actor_loss(rows).backward()
    for one, two in zip(prdc.actor_params, other.actor_params, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("kind", ["prdc.Prdc", "rebrac.Rebrac"])
def test_it_may_take_an_action_that_the_data_have_elsewhere(kind: str) -> None:
    """The data have -0.5 at one state and 0.5 at the other; the larger action is the better one
    at both. TD3+BC stays near -0.5 where the data are, PRDC with beta 0 does not."""
    settings = {"beta": 0.0} if kind.startswith("prdc") else {}
    learner = make(kind, LINE, actor_bc=10.0, actor_lr=1e-2, **settings)
    rows = still(torch.tensor([[-1.0], [1.0]]), torch.tensor([[-0.5], [0.5]]), torch.zeros(2))
    learner.fit(rows)
    slopes(learner.critic, [1.0, 1.0])
    torch.nn.init.constant_(learner.policy.net[-1].bias, 0.5)  # nearer to 0.5 at the start
    for _ in range(200):
        learner._actor_step(rows)
    low, high = learner.policy({"state": rows["obs/state"]}).flatten().tolist()
    assert high > 0.4 and (low > 0.4 if settings else low < -0.3)


def test_it_needs_the_data() -> None:
    learner = make("prdc.Prdc", SPEC)
    with pytest.raises(ConfigError, match="searches a dataset"):
        learner._actor_loss(transitions(4, SPEC))
