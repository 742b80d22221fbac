"""PROTECTED: a set of policies of which one acts in each episode, and EXP3, which learns which."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, allow, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.wrappers.policy_set import PolicySet
from tests.builders import make_learner, node_of, run_folder
from tests.training.test_train import resumed, run, settings

allow("tests")
SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
DOORS = {"_target_": "tests.learners.finetune.test_steering.Doors", "sides": False}


@dataclass(frozen=True)
class HoldsConfig:
    action: float = 0.0


class Holds(Policy):
    """Always the same action; its carry counts its decisions."""

    def __init__(self, config: HoldsConfig, spec: Spec) -> None:
        super().__init__()
        self.spec, self.chunk = spec, 2
        self.register_buffer("action", torch.tensor(config.action))

    def initial(self, n: int) -> Tensors:
        return {"count": torch.zeros(n)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        assert isinstance(self.action, Tensor)
        return self.action.expand(len(noise), 2, 1), {"count": carry["count"] + 1}


def holds(*actions: float) -> list[dict[str, Any]]:
    return [{"_target_": f"{__name__}.Holds", "action": action} for action in actions]


def policy_set(*actions: float) -> PolicySet:
    base, *others = holds(*actions)
    node = node_of("policies.wrappers.policy_set.PolicySet", base=base, members=others)
    return build(node, PolicySet, spec=SPEC)


def ended(member: list[int], probability: list[float], returns: list[float]) -> Tensors:
    """A batch of episodes of two decisions each, in parallel environments, of whole returns."""
    n = len(member)
    halves = torch.tensor(returns).expand(2, n) / 2
    return {
        "member": torch.tensor(member).expand(2, n),
        "probability": torch.tensor(probability).expand(2, n),
        "first": torch.tensor([[True], [False]]).expand(2, n),
        "ended": torch.tensor([[False], [True]]).expand(2, n),
        "valid": torch.ones(2, n, dtype=torch.bool),
        "reward": halves,
        "discount": torch.tensor([[1.0], [0.0]]).expand(2, n),
    }


def test_weights_by_hand() -> None:
    """Two members, T = 50, rate 2: eta = 2 sqrt(ln 2 / 100)."""
    learner: Any = make_learner(
        "finetune.exp3.Exp3", policy_set(0.1, 0.2), episodes=50, returns=[-10.0, 10.0]
    )
    eta = 2 * math.sqrt(math.log(2) / 100)
    metrics = learner.update(ended([1, 0, 1], [0.5, 0.5, 0.25], [5.0, -40.0, 30.0]))
    # Gains: 15 / 20, 0 (clipped), 1 (clipped).
    expected = eta * 0.75 / (0.5 + eta / 2) + eta / (0.25 + eta / 2)
    assert learner.log_weights.tolist() == pytest.approx([0.0, expected])
    p = 1 / (1 + math.exp(-expected))
    assert learner.policy.probability.tolist() == pytest.approx([1 - p, p])
    assert metrics["mean_return"].item() == pytest.approx(-5 / 3)
    assert metrics["episodes"].item() == 3


def test_one_member_acts_in_an_episode_as_often_as_its_probability_says() -> None:
    policy = policy_set(-0.5, 0.1, 0.7)
    policy.probability.copy_(torch.tensor([0.2, 0.0, 0.8]))
    torch.manual_seed(0)
    n, actions = 4000, torch.tensor([-0.5, 0.1, 0.7])
    actor, first = Actor(policy, n, explore=True), torch.ones(n, dtype=torch.bool)
    played: list[Tensor] = []
    for step in range(8):
        actor({"state": torch.zeros(n, 2)}, first & (step in (0, 4)))
        played.append(actor.extras["member"].clone())
        assert torch.equal(actor.plan[:, 0, 0], actions[played[-1]])
        assert torch.equal(actor.extras["probability"], policy.probability[played[-1]])
    assert torch.equal(played[0], played[3]) and torch.equal(played[4], played[7])
    assert not torch.equal(played[0], played[4])
    share = torch.bincount(played[0], minlength=3) / n
    torch.testing.assert_close(share, policy.probability, atol=0.03, rtol=0)
    calm = policy.act({"state": torch.zeros(5, 2)}, policy.initial(5), policy.sample_noise(5))
    assert (calm[0] == 0.7).all() and (calm[1]["2/count"] == 1).all()


def test_what_is_lost_to_the_best_member_is_within_the_bound_of_exp3() -> None:
    """Bernoulli returns of three members; sqrt(2 K ln K / T) bounds it; a uniform mix loses 0.5."""

    def regret(rate: float) -> float:
        torch.manual_seed(0)
        policy, good = policy_set(0.0, 0.1, 0.2), torch.tensor([0.1, 0.2, 0.9])
        learner: Any = make_learner("finetune.exp3.Exp3", policy, episodes=1000, rate=rate)
        lost = 0.0
        for _ in range(1000):
            member = policy.choose(torch.rand(1))
            lost += float(good.max() - good[member]) / 1000
            result = float(torch.rand(()) < good[member])
            learner.update(ended(member.tolist(), policy.probability[member].tolist(), [result]))
        return lost

    assert regret(2.0) < math.sqrt(2 * 3 * math.log(3) / 1000) < 0.4 < regret(0.0)


def protected(folder: Path, steps: int) -> dict[str, Any]:
    runs = [
        run_folder(folder / f"{action}", DOORS, node, (0,))
        for action, node in zip((0.0, 0.35, 0.9), holds(0.0, 0.35, 0.9), strict=True)
    ]
    first, *others = map(str, runs)
    node = node_of("policies.wrappers.policy_set.PolicySet", members=others)
    given = {"init": first, "policy": node, "steps": steps, "env": DOORS, "execute": None}
    learner = node_of("learners.finetune.exp3.Exp3", episodes=200)
    return settings(folder / "run", "on_policy", learner=learner, **given)


def test_trained_runs_become_a_policy_that_plays_the_best_one(tmp_path: Path) -> None:
    policy = checkpoint.load_policy(run(protected(tmp_path, 900)))
    assert isinstance(policy, PolicySet)
    assert policy.probability.argmax() == 1 and policy.probability[1] > 0.8
    seen = {"state": torch.zeros(1, 2)}
    assert policy.act(seen, policy.initial(1), policy.sample_noise(1))[0][0, 0, 0] == 0.35


def test_resume_is_exact(tmp_path: Path) -> None:
    resumed(protected(tmp_path, 240), 116)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"policy\.members names trained runs"):
        policy_set(0.1)
    with pytest.raises(ConfigError, match="low < high"):
        make_learner("finetune.exp3.Exp3", policy_set(0.1, 0.2), returns=[1.0, 1.0])
    with pytest.raises(ConfigError, match="policy=policy_set"):
        make_learner("finetune.exp3.Exp3", build(holds(0.1)[0], Policy, spec=SPEC))
