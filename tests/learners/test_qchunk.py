"""Q-chunking: targets on a chain whose values are known, choices by hand, a problem to solve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import transitions
from embodied.learners.imitation.behavior_cloning import behaviour
from embodied.learners.learner import Learner
from embodied.learners.offline.qchunking import QChunking
from embodied.training.collector import Collector
from tests.builders import make_learner, make_policy
from tests.learners.bandit import slopes, two_modes
from tests.toy_envs import Config, Counter

GAMMA = 0.9
SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "width": 16, "depth": 1}
CRITIC = {"_target_": "embodied.learners.critics.Critic", "n": 2}


def make(chunk: int = 1, n: int = 3, hidden: tuple[int, ...] = (16,), **settings: Any) -> QChunking:
    critic = {**CRITIC, "hidden": list(hidden)}
    policy = make_policy(
        "wrappers.best_of_n.BestOfN", SPEC, base=FLOW, critic=critic, n=n, chunk=chunk
    )
    given = {"batch_size": 16, "gamma": GAMMA, **settings}
    return make_learner("offline.qchunking.QChunking", policy, **given)


class Known(nn.Module):
    """Two critics that know the value of a state."""

    def __init__(self, value: Callable[[float], float]) -> None:
        super().__init__()
        self.value = value

    def forward(self, obs: Tensors, action: Tensor) -> Tensor:
        values = [self.value(s) for s in obs["state"][:, 0].tolist()]
        return torch.tensor([values, values])


def returned(s: float, steps: int) -> float:
    """What the Counter pays from `s` in `steps` steps: s + gamma (s + 1) + ..."""
    return sum(GAMMA**i * (s + i) for i in range(steps))


def forever(s: float) -> float:
    """sum_i gamma^i (s + i)"""
    return s / (1 - GAMMA) + GAMMA / (1 - GAMMA) ** 2


def left(s: float) -> int:
    """Steps to the end of the Counter's rows: one ends (for good) at 3, one (by the clock) at 5."""
    return int(3 - s if s < 100 else 105 - s)


def true_value(s: float) -> float:
    """The first row's world ends with its episode, the other's goes on behind the clock."""
    return returned(s, left(s)) if s < 100 else forever(s)


def recorded() -> Episodes:
    """One episode of each row of the Counter."""
    state = torch.tensor([0.0, 1, 2, 100, 101, 102, 103, 104])
    last = torch.tensor([0, 0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    steps = {
        "obs/state": state[:, None],
        "action": torch.zeros(8, 1),
        "reward": state,
        "terminated": last & (state < 100),
        "truncated": last & (state >= 100),
    }
    final = {"state": torch.tensor([[3.0], [105.0]])}
    return Episodes(SPEC, steps, torch.tensor([0, 3]), torch.tensor([3, 5]), final)


def lived(chunk: int) -> Tensors:
    """Rows of the running world."""
    learner = make(chunk)
    rollout = Collector(Counter(Config()), learner.policy, GAMMA, executed_steps=True)
    parts = [rows for _ in range(20) if (rows := rollout.step()[0])]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("source", ["recorded", "lived"])
def test_the_target_is_the_return_at_every_distance_from_the_end(source: str, chunk: int) -> None:
    learner = make(chunk)
    rows = transitions(recorded(), GAMMA, chunk) if source == "recorded" else lived(chunk)
    states = rows["obs/state"][:, 0].tolist()
    if source == "recorded":
        assert states == [0, 1, 2, 100, 101, 102, 103, 104]
    following = under(rows, "next_obs")
    learner.target = Known(lambda s: 0.0)
    nothing = learner._backup(rows["reward"], rows["discount"], following)
    expected = [returned(s, min(chunk, left(s))) for s in states]
    torch.testing.assert_close(nothing, torch.tensor(expected))
    learner.target = Known(true_value)
    bootstrapped = learner._backup(rows["reward"], rows["discount"], following)
    torch.testing.assert_close(bootstrapped, torch.tensor([true_value(s) for s in states]))


@pytest.mark.parametrize("source", ["recorded", "lived"])
def test_only_executed_steps_are_imitated(source: str) -> None:
    """A chunk that the end of an episode cuts short holds actions that nobody took."""
    learner = make(chunk=4)
    rows = transitions(recorded(), GAMMA, 4) if source == "recorded" else lived(4)
    steps = [min(4, left(s)) for s in rows["obs/state"][:, 0].tolist()]
    assert 1 in steps and 4 in steps
    imitated = behaviour(rows, learner.policy)["valid"]
    assert imitated.sum(1).tolist() == steps
    assert (imitated.int().diff(dim=1) <= 0).all()  # from the first one on


@pytest.mark.parametrize(
    ("aggregate", "of"), [("mean", lambda a: 4 * a), ("min", lambda a: torch.minimum(2 * a, 6 * a))]
)
def test_learning_critics_choose_and_their_averages_value(aggregate: str, of: Any) -> None:
    learner = make(hidden=(), n=4, aggregate=aggregate)
    slopes(learner.critic, [-1.0, -1.0])  # the smallest action is the best
    slopes(learner.target, [2.0, 6.0])
    following, reward = {"state": torch.randn(6, 1)}, torch.arange(6.0)
    discount = torch.tensor([0.9, 0.9, 0.9, 0.81, 0.81, 0.0])
    torch.manual_seed(4)
    candidates = learner.policy.proposals(following, learner.policy.sample_noise(6, explore=True))[
        :, :, 0
    ]
    torch.manual_seed(4)
    backup = learner._backup(reward, discount, following)
    torch.testing.assert_close(backup, reward + discount * of(candidates.amin(1)))
    assert candidates.amin(1).max() < candidates.amax(1).min()


def test_keeps_both_modes_and_acts_in_the_better_one() -> None:
    learner = make(n=8, batch_size=64, actor_lr=3e-3, critic_lr=3e-3)
    for _ in range(300):
        learner.update(two_modes(64))
    obs = {"state": torch.zeros(200, 1)}
    policy = learner.policy
    cloned = policy.base.act(obs, {}, policy.base.sample_noise(200))[0]
    assert 0.3 < (cloned > 0).float().mean() < 0.7
    acted = policy.act(obs, {}, policy.sample_noise(200))[0]
    assert (acted > 0).float().mean() > 0.95


def test_each_step_moves_its_own_part() -> None:
    learner = make(tau=0.3)
    target = [weight.clone() for weight in learner.target_params]
    base = [weight.detach().clone() for weight in learner.policy.base.parameters()]
    learner.update(two_modes(16))
    for old, new, average in zip(target, learner.critic_params, learner.target_params, strict=True):
        torch.testing.assert_close(average, 0.7 * old + 0.3 * new.detach())
    moved = zip(base, learner.policy.base.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in moved)
    assert learner.critic is learner.policy.critic


def test_refusals() -> None:
    flow = build(FLOW, Policy, spec=SPEC)
    with pytest.raises(ConfigError, match="policy=best_of_n"):
        build({"_target_": "embodied.learners.offline.qchunking.QChunking"}, Learner, policy=flow)
    with pytest.raises(ConfigError, match="hold 1 steps per decision"):
        learner = make(2)
        learner._actor_loss(two_modes(4))
