"""ReBRAC: both penalties by hand, TD3 where they are zero, TD3+BC, and staying near the data."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.off_policy.td3 import Td3
from embodied.learners.offline.rebrac import Rebrac, behaved_loss
from tests.builders import make_learner, make_policy, still, transitions

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
CONFIGS = Path(__file__).parents[2] / "configs" / "learner"


def make(target: str = "offline.rebrac.Rebrac", **settings: object) -> Td3:
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[32])
    return make_learner(target, policy, **{"hidden": [32], "batch_size": 4, **settings})


def batch_of(n: int) -> Tensors:
    torch.manual_seed(1)
    return {**transitions(n, SPEC), "next_action": torch.rand(n, 2) * 2 - 1}


@torch.no_grad()
def constant_targets(learner: Td3, values: list[float]) -> None:
    for parameter in learner.target.ensemble.parameters():
        parameter.zero_()
    learner.target.ensemble.biases[-1].copy_(torch.tensor(values).view(-1, 1, 1))


def test_the_actor_loss_by_hand() -> None:
    q, apart = torch.tensor([2.0, -4.0]), torch.tensor([1.0, 3.0])
    # 0.1 * 2 - (-1) / 3
    assert behaved_loss(q, 0.1 * apart.mean()).item() == pytest.approx(0.2 + 1 / 3)


def test_values_count_in_their_own_units() -> None:
    q, apart = torch.tensor([2.0, -4.0], requires_grad=True), torch.tensor([1.0, 3.0])
    slopes = []
    for scale in (1.0, 1000.0):
        q.grad = None
        behaved_loss(scale * q, 0.1 * apart.mean()).backward()
        assert q.grad is not None
        slopes.append(q.grad.tolist())
    assert slopes[0] == pytest.approx(slopes[1])
    assert slopes[0] == pytest.approx([-1 / 6, -1 / 6])  # 1 / N / mean |q|


@pytest.mark.parametrize(("distance", "over"), [("sum", 1), ("mean", 2)])
def test_the_critic_penalty_by_hand(distance: str, over: int) -> None:
    """Q' = min(4, 3): y = r + 0.9 (3 - 0.5 |a~' - a'|^2), without it where a' is unknown."""
    learner = make(critic_bc=0.5, distance=distance, target_noise=0.0)
    constant_targets(learner, [4.0, 3.0])
    batch = batch_of(3)
    batch["next_action"][2] = math.nan
    action = learner.target_policy({"state": batch["next_obs/state"]})
    apart = (action - batch["next_action"]).square().sum(1) / over
    backup = batch["reward"] + 0.9 * (3 - 0.5 * torch.stack([*apart[:2], torch.tensor(0.0)]))
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    expected = (q - backup).square().mean(1).sum().item()
    loss, _ = learner._critic_loss(batch)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_without_penalties_it_is_td3() -> None:
    """The critics' loss and its noise are TD3's, bit for bit."""
    losses = []
    for target, more in (("offline.rebrac.Rebrac", {"critic_bc": 0.0}), ("off_policy.td3.Td3", {})):
        learner = make(target, layer_norm=False, **more)
        torch.manual_seed(2)
        losses.append(learner._critic_loss(batch_of(4))[0].item())
    assert losses[0] == losses[1]


def test_td3_bc_is_a_setting() -> None:
    """Fujimoto and Gu: -2.5 / mean|Q| Q_1 + mse, here divided by 2.5."""
    node = yaml.safe_load((CONFIGS / "td3_bc.yaml").read_text())
    learner = make(**{key: value for key, value in node.items() if key != "_target_"})
    assert isinstance(learner, Rebrac) and learner.columns == ()
    batch = batch_of(4)
    obs = {"state": batch["obs/state"]}
    action = learner.policy(obs)
    q = learner.critic(obs, action)[0]
    mse = torch.nn.functional.mse_loss(action, batch["action"])
    expected = (-2.5 / q.abs().mean() * q.mean() + mse) / 2.5
    assert learner._actor_loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_actor_climbs_the_smaller_critic() -> None:
    learner = make(actor_bc=0.0)
    batch = batch_of(4)
    obs = {"state": batch["obs/state"]}
    q = learner.critic(obs, learner.policy(obs)).amin(0)
    assert learner._actor_loss(batch).item() == pytest.approx((-q.mean() / q.abs().mean()).item())


@pytest.mark.parametrize(("weight", "low", "high"), [(30.0, 0.25, 0.4), (0.003, 0.7, 1.0)])
def test_the_penalty_holds_the_policy_at_the_data(weight: float, low: float, high: float) -> None:
    """Reward is the action; the data's are 0.3 and a little around it. Unpenalised it runs off."""
    learner = make(actor_bc=weight, critic_bc=0.0, actor_lr=3e-3, critic_lr=3e-3)
    torch.manual_seed(3)
    for _ in range(400):
        action = 0.3 + 0.1 * torch.randn(64, 2)
        learner.update(still(torch.zeros(64, 3), action, action.mean(1)))
    action = learner.policy({"state": torch.zeros(1, 3)})
    assert low < action.mean().item() < high
