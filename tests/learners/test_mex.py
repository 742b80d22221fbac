"""MEX: its term by hand, what it converges to, and TD3 where there is no optimism."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.off_policy.mex import promised
from tests.builders import make_learner, make_policy, transitions

LINE = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make(target: str = "mex.Mex", **settings: Any) -> Any:
    policy = make_policy("deterministic.Deterministic", LINE, hidden=[16])
    given = {"hidden": [16], "batch_size": 16, **settings}
    return make_learner(f"off_policy.{target}", policy, **given)


def trained(target: str, **settings: Any) -> tuple[Tensors, Tensors]:
    learner = make(target, **settings)
    for seed in range(8):
        torch.manual_seed(seed)
        metrics = learner.update(transitions(16, LINE))
    return learner.state_dict(), metrics


@pytest.mark.parametrize("atoms", [0, 11])
def test_it_is_td3_without_optimism(atoms: int) -> None:
    td3, _ = trained("td3.Td3", atoms=atoms)
    for optimism, same in ((0.0, True), (0.1, False)):
        mex, metrics = trained("mex.Mex", atoms=atoms, optimism=optimism)
        assert all(torch.equal(mex[key], td3[key]) for key in td3) == same
        assert (metrics["promise"] == 0) == same


def test_its_term_by_hand() -> None:
    own = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    rivals = torch.tensor([[[0.0, 0.0], [1.0, -1e9]], [[0.0, 0.0], [0.0, 0.0]]])
    first = ((1 - math.log(2)) + (2 - 1)) / 2
    second = -math.log(2)
    assert promised(own, rivals).item() == pytest.approx(first + second)


def test_its_rivals_are_recorded_neighbouring_and_random_actions() -> None:
    """Critics that answer a_0 (1 and -5 times), for a policy that does 0.4 everywhere."""
    learner = make(optimism=2.0)
    with torch.no_grad():
        for parameter in learner.critic.ensemble.parameters():
            parameter.zero_()
        for parameter in learner.policy.parameters():
            parameter.zero_()
        learner.critic.ensemble.weights[0][:, 3, :2] = torch.tensor([1.0, -1.0])
        signs = torch.tensor([1.0, -5.0])[:, None] * torch.tensor([1.0, -1.0])
        learner.critic.ensemble.weights[1][:, :2, 0] = signs
        learner.actor_params[-1].copy_(torch.atanh(torch.tensor([0.4, 0.0])))
    batch = transitions(1, LINE)
    batch["action"] = torch.tensor([[-0.3, 0.0]])
    actions = learner._proposals(batch)
    uniform = actions[0, 2, 0].item()
    assert actions[0, :2, 0].tolist() == pytest.approx([0.4, 0.4]) and abs(uniform) < 1
    torch.manual_seed(3)
    uniform = learner._proposals(batch)[0, 2, 0].item()
    expected = 0.0
    for scale in (1.0, -5.0):
        rivals = torch.tensor([scale * each for each in (-0.3, 0.4, uniform)])
        expected += scale * 0.4 - rivals.logsumexp(0).item()
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    torch.manual_seed(3)
    assert learner.critic_terms(batch, q).item() == pytest.approx(-2 * expected, rel=1e-5)
    assert not any(p.grad is not None for p in learner.actor_params)


def test_optimism_of_data_is_half_of_eta_above_the_target() -> None:
    learner = make(optimism=0.8, raised="data", critic_lr=0.01)
    batch = transitions(4, LINE)
    batch["discount"] = torch.zeros(4)  # the target is the reward
    for _ in range(1500):
        metrics = learner.critic_step(batch)
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    torch.testing.assert_close(q, (batch["reward"] + 0.4).expand(2, 4), atol=0.02, rtol=0)
    assert metrics["promise"].item() == pytest.approx(2 * 1.9, abs=0.05)
