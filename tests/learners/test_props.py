"""PROPS: the sampling error in closed form, and a behaviour policy that lowers it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.on_policy.props import Props, sampling_error
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import make_learner, make_policy
from tests.learners.test_ppo import steps
from tests.toy_envs import Config, Counter

ARMS = Spec({"state": Leaf((3,))}, Leaf((), "int64", 0, 2), dt=0.1)


def make(seed: int = 0, head: float = 0.0, **settings: Any) -> Props:
    policy = make_policy("categorical.Categorical", ARMS, seed, hidden=[8], head=head)
    given = {"horizon": 8, "batch_size": 8, "normalize": False, "behaviour_lr": 0.02, **settings}
    return make_learner("on_policy.props.Props", policy, **given)


def pulled(arms: list[int]) -> Tensors:
    """A batch [1, N] of actions that were taken at one observation."""
    state = torch.ones(1, len(arms), 3)
    return {"obs/state": state, "action": torch.tensor([arms]), "valid": torch.ones(1, len(arms))}


def chances(policy: Any) -> Tensor:
    return policy({"state": torch.ones(1, 3)})[0].detach().exp().flatten()


def test_the_sampling_error_is_the_divergence_of_the_frequencies() -> None:
    """KL(frequencies || pi), for pi uniform: log 3 - H."""
    learner = make()
    batch = pulled([0] * 4 + [1] * 2 + [2] * 2)
    batch["valid"][0, 7] = 0  # 4, 2 and 1 of 7
    frequencies = torch.tensor([4, 2, 1]) / 7
    expected = math.log(3) + (frequencies * frequencies.log()).sum().item()
    found = sampling_error(learner.policy, learner._decisions(batch), 400)
    assert found.item() == pytest.approx(expected, abs=1e-3)
    even = sampling_error(learner.policy, learner._decisions(pulled([0, 1, 2])), 400)
    assert even.item() == pytest.approx(0, abs=1e-4)


def test_what_was_taken_too_often_is_taken_less() -> None:
    """Within the divergence, starting from pi each time; pi stays."""
    learner = make(behaviour_kl=0.02, behaviour_minibatches=1)
    before = chances(learner.policy)
    for arms in ([0, 0, 0, 0, 0, 0, 1, 1], [2, 2, 2, 2, 2, 2, 1, 1]):
        learner.adapt_behaviour(pulled(arms))
        now = chances(learner.behaviour)
        often, never = arms[0], 2 - arms[0]
        assert now[often] < now[1] < now[never] and now[never] > 0.36
        assert (before * (before / now).log()).sum() < 0.05
    assert torch.equal(chances(learner.policy), before)
    assert all(p.grad is None and p.requires_grad for p in learner.policy.parameters())
    learner.adapt_behaviour({key: value[:, :0] for key, value in pulled([0]).items()})
    assert torch.equal(chances(learner.behaviour), before)


@pytest.mark.parametrize(("ratio", "loss", "pushed"), [(1.5, 1.5, True), (0.6, 0.7, False)])
def test_the_loss_of_the_behaviour_by_hand(ratio: float, loss: float, pushed: bool) -> None:
    """-min(-g, -clip(g, 0.7, 1.3)): once g is below 0.7 it falls no further."""
    learner = make(behaviour_weight=0.0)
    flat = learner._decisions(pulled([0]))
    flat["old"] = chances(learner.behaviour)[:1].log() - math.log(ratio)
    found, kl = learner._behaviour_loss(flat)
    assert (found.item(), kl.item()) == pytest.approx((loss, 0.0), abs=1e-6)
    found.backward()
    slope = learner.behaviour.layers()[-1].bias.grad
    assert (slope[0] > 0.1) == pushed and (pushed or not slope.any())


def collected(learner: Props, count: int, adapts: bool) -> float:
    """The sampling error of `count` decisions of a fixed policy, in batches of 16."""
    batch: Tensors = {}
    states = torch.eye(3)
    for _ in range(count // 16):
        obs = {"state": states[torch.randint(3, (16,))]}
        behaviour: Any = learner.behaviour if adapts else learner.policy
        action = behaviour.act(obs, {}, behaviour.sample_noise(16, True))[0]
        new = {"obs/state": obs["state"], "action": action[:, 0], "valid": torch.ones(16)}
        batch = {key: torch.cat([batch.get(key, value[:0]), value]) for key, value in new.items()}
        if adapts:
            learner.adapt_behaviour({key: value[None] for key, value in batch.items()})
    return sampling_error(learner.policy, batch, 200).item()


def test_the_data_of_a_fixed_policy_are_more_like_it() -> None:
    errors = {True: 0.0, False: 0.0}
    for seed in range(4):
        for adapts in errors:
            learner = make(seed, head=1.0, behaviour_epochs=4, behaviour_minibatches=4)
            learner.behaviour_policy()
            torch.manual_seed(seed)
            with torch.set_grad_enabled(True):
                errors[adapts] += collected(learner, 192, adapts)
    assert errors[True] < 0.6 * errors[False]


def test_it_is_adapted_every_k_decisions_to_all_that_is_kept(monkeypatch: Any) -> None:
    env = Counter(Config())
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", env.spec, hidden=[4])
    given = {"horizon": 6, "batch_size": 6, "epochs": 1, "every": 2, "behaviour_epochs": 1}
    learner = make_learner("on_policy.props.Props", policy, **given)
    seen: list[int] = []
    adapt = Props.adapt_behaviour

    def noting(self: Props, batch: Tensors) -> None:
        seen.append(int(batch["valid"].sum()) // env.num_envs)
        adapt(self, batch)

    monkeypatch.setattr(Props, "adapt_behaviour", noting)
    acting = learner.behaviour_policy()
    loop = OnPolicyLoop(Collector(env, acting, learner.gamma), learner)
    steps(loop, 15 * env.num_envs)
    assert seen == [2, 4, 6, 8, 10, 6, 8]
    assert acting is learner.behaviour and acting is not learner.policy


def test_a_policy_without_a_known_divergence_is_refused() -> None:
    inner = {"_target_": "embodied.policies.categorical.Categorical"}
    with pytest.raises(ConfigError, match="policy=categorical"):
        make_learner("on_policy.props.Props", make_policy("recurrent.Recurrent", ARMS, inner=inner))
