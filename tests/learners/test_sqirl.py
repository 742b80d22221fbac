"""SQIRL: returns, backups and masks by hand; a trap that needs two heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import MASK, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.evaluation.evaluate import evaluate
from embodied.learners.on_policy.sqirl import Sqirl, decisions
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import make_learner, make_policy
from tests.learners.parts import copies, moved
from tests.learners.test_ppo import steps
from tests.toy_envs import Tree, TreeConfig

ARMS = Spec({"state": Leaf((3,))}, Leaf((), "int64", 0, 2), dt=0.1)
POLICY = "staged_categorical.StagedCategorical"


def make(spec: Spec = ARMS, stages: int = 2, **settings: Any) -> Sqirl:
    policy = make_policy(POLICY, spec, steps=stages, hidden=[32])
    given = {"horizon": 8, "batch_size": 64, "gamma": 0.5, **settings}
    return make_learner("on_policy.sqirl.Sqirl", policy, **given)


def test_pictures_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose vectors"):
        make(ARMS.with_obs(front=Leaf((16, 16, 3), "uint8")))


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_returns_end_with_the_episode_and_those_that_go_on_are_left_out() -> None:
    batch = {
        "obs/state": column(0, 1, 2, 3, 4, 5)[..., None],
        "next_obs/state": column(1, 2, 3, 4, 5, 6)[..., None],
        "action": torch.zeros(6, 1, dtype=torch.int64),
        "reward": column(1, 2, 4, 8, 16, 32),
        "ended": column(0, 1, 0, 0, 1, 0).bool(),
        "valid": torch.ones(6, 1, dtype=torch.bool),
        "step": column(1, 2, 0, 1, 2, 0).long(),
    }
    found = decisions(batch, 0.5, 1)
    assert found["obs/state"].flatten().tolist() == [0, 1, 3, 4]
    assert found["togo"].tolist() == [1 + 0.5 * 2, 2, 8 + 0.5 * 16, 16]
    assert found["discount"].tolist() == [0.5, 0, 0.5, 0]
    assert batch["reward"].flatten().tolist() == [1, 2, 4, 8, 16, 32]


def test_the_loss_of_three_heads_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head 1 regresses the return, head j + 1 r + d max of head j at the next observation."""
    learner = make(depth=3)
    now = torch.arange(9.0).view(1, 3, 3)
    following = torch.tensor([[[1.0, 5, 2], [7, 0, 3], [9, 9, 9]]])

    def heads(obs: Tensors) -> Tensor:
        return now if obs["state"].sum() == 0 else following

    monkeypatch.setattr(learner, "_heads", heads)
    data = {
        "obs/state": torch.zeros(1, 3),
        "next_obs/state": torch.ones(1, 3),
        "action": torch.tensor([2]),
        "reward": torch.tensor([10.0]),
        "discount": torch.tensor([0.5]),
        "togo": torch.tensor([20.0]),
    }
    errors = [2.0 - 20, 5.0 - (10 + 0.5 * 5), 8.0 - (10 + 0.5 * 7)]
    assert learner.loss(data).item() == pytest.approx(sum(e * e for e in errors) / 3)


def test_a_step_acts_by_its_own_network_and_later_ones_are_random_to_explore() -> None:
    learner = make(stages=3)
    policy = learner.policy
    with torch.no_grad():
        for step in range(3):  # the network of a step prefers the action of its number
            policy.net.biases[-1][step] = 100 * torch.eye(3)[step]
    policy.trained += 2
    obs = {"state": torch.randn(300, 3)}
    carry = policy.initial(300)
    seen: list[Tensor] = []
    for _ in range(4):
        action, carry = policy.act(obs, carry, policy.sample_noise(300, True))
        seen.append(action.flatten())
    assert (seen[0] == 0).all() and (seen[1] == 1).all()
    assert all(60 < count < 140 for count in seen[2].bincount(minlength=3).tolist())
    carry = policy.initial(300)
    for expected in (0, 1, 1, 1):  # without exploration the last trained network goes on
        action, carry = policy.act(obs, carry, policy.sample_noise(300))
        assert (action == expected).all()
    assert carry["row/step"].unique().tolist() == [3]


@torch.no_grad()
def test_the_last_head_is_frozen_for_its_step() -> None:
    learner = make(stages=2, depth=2, normalize=False)
    obs = {"state": torch.randn(5, 3)}
    learner._freeze(0)
    before = learner.policy.values(obs, torch.zeros(5, dtype=torch.int64))
    torch.testing.assert_close(before, learner._heads(obs)[:, 1])
    for weight in learner.params:
        weight.add_(1.0)
    learner._freeze(1)
    found = learner.policy.values(obs, torch.tensor([0, 0, 1, 1, 5]))
    torch.testing.assert_close(found, torch.cat([before[:2], learner._heads(obs)[2:, 1]]))
    kept = copies(learner.policy.state_dict().values())
    assert learner.update({})["stage"] == 2  # all steps are trained: nothing changes any more
    assert not any(moved(kept, learner.policy.state_dict().values()))


def test_forbidden_actions_are_neither_taken_nor_backed_up() -> None:
    spec = ARMS.with_obs(**{MASK: Leaf((3,), low=0.0, high=1.0)})
    learner = make(spec)
    obs = {"state": torch.randn(50, 3), MASK: torch.tensor([[0.0, 1.0, 1.0]]).expand(50, 3)}
    policy = learner.policy
    action, _ = policy.act(obs, policy.initial(50), policy.sample_noise(50, True))
    assert set(action.flatten().tolist()) == {1, 2}
    assert (learner._heads(obs)[..., 0] < -1e8).all()


@pytest.mark.parametrize(("depth", "expected"), [(1, 0.5), (2, 1.0)])
def test_a_trap_needs_two_heads(depth: int, expected: float) -> None:
    """After action 1 random behaviour is worth 1/4, and the best 1; action 0 pays 1/2 at once."""
    env = Tree(TreeConfig({"0": 0.5, "13": 1.0}, actions=4, goal="13", num_envs=16))
    settings = {"depth": depth, "horizon": 40, "epochs": 60, "lr": 0.01, "gamma": 1.0}
    learner = make(env.spec, **settings)
    torch.manual_seed(0)
    loop = OnPolicyLoop(Collector(env, learner.policy, 1.0), learner)
    steps(loop, 2 * 40 * 16)
    assert int(learner.policy.trained) == 2
    found = evaluate(learner.policy, env, 16, seed=1)
    assert found.metrics()["return"] == pytest.approx(expected)
