"""SQIRL: returns, backups and masks by hand, a trap; ReLIC: partial updates see the context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import MASK, Leaf, Spec
from embodied.core.tensors import Tensors, cat, each, under
from embodied.envs.toy import bandit
from embodied.envs.wrappers import trials
from embodied.envs.wrappers.trials import Trials
from embodied.evaluation.evaluate import evaluate
from embodied.learners.critics import ValueConfig
from embodied.learners.on_policy.relic import Config, Relic
from embodied.learners.on_policy.sqirl import Sqirl, decisions
from embodied.policies.transformer import CausalAttention
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import make_learner, make_policy, node_of
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


ENVS, HORIZON = 3, 4


def learner(env: Trials, chunks: int = 3, **settings: Any) -> Relic:
    inner = node_of("policies.categorical.Categorical", hidden=[])
    made = {"width": 8, "heads": 2, "window": 32, "sink": True, "inner": inner}
    policy = make_policy("transformer.Transformer", env.spec, **made)
    sizes: dict[str, Any] = {"horizon": HORIZON, "batch_size": 8, "epochs": 1, "lr": 0.01}
    return Relic(Config(chunks=chunks, **(sizes | settings)), policy, env.spec)


def lifetimes(pulls: int = 100) -> Trials:
    """Longer than a rollout unless `pulls` says otherwise."""
    made = bandit.Bandit(bandit.Config(arms=3, num_envs=ENVS))
    return Trials(trials.Config(episodes=pulls), made)


class Watched:
    """A learner, its loop, its batches and the carries that its updates were given."""

    def __init__(self, pulls: int = 100, **settings: Any) -> None:
        env = lifetimes(pulls)
        self.relic: Any = learner(env, **settings)
        collector = Collector(env, self.relic.policy, self.relic.gamma, seed=0)
        self.loop = OnPolicyLoop(collector, self.relic)
        self.batches: list[Tensors] = []
        self.carries: list[Tensors] = []
        self.relic.update = kept(self.relic.update, self.batches, 0)
        self.relic._table = kept(self.relic._table, self.carries, 1)

    def run(self, updates: int) -> None:
        for _ in range(updates * HORIZON):
            self.loop.advance()


def kept(method: Callable[..., Any], seen: list[Tensors], at: int) -> Callable[..., Any]:
    """`method`, whose argument number `at` is copied to `seen` first."""

    def call(*given: Any) -> Any:
        seen.append(each(given[at], torch.clone))
        return method(*given)

    return call


@pytest.mark.parametrize("pulls", [100, 3])
def test_the_context_is_that_of_the_whole_past_by_the_parameters_of_now(pulls: int) -> None:
    """At each boundary, also where lifetimes end within batches."""
    seen = Watched(pulls)
    for boundary in (1, 2):
        seen.run(1)
        past = cat(seen.batches)
        assert len(past["first"]) == boundary * HORIZON
        begun = seen.relic.policy.initial(ENVS)
        with torch.no_grad():
            _, expected = seen.relic.policy.along(under(past, "obs"), begun, past["first"])
        carry = seen.loop.collector.actor.carry
        assert torch.equal(carry["known"], expected["known"])
        known = expected["known"][:, None, :, None]
        for key in ("keys", "values"):
            here, there = carry[key] * known, expected[key] * known
            torch.testing.assert_close(here, there, atol=1e-5, rtol=0)


def test_each_batch_is_learned_after_those_before_it_then_all_of_them() -> None:
    """The second batch with the context of the first, then both from the start; then anew."""
    seen = Watched(chunks=2)
    seen.run(2)
    known = [int(carry["known"].sum()) for carry in seen.carries]
    assert known == [0, ENVS * HORIZON, 0]
    assert not seen.relic.rollout and seen.relic.begun["known"].sum() == 2 * ENVS * HORIZON
    assert seen.relic.done == 2 * ENVS * HORIZON
    seen.run(1)
    assert len(seen.relic.rollout) == 1 and seen.carries[3]["known"].sum() == 2 * ENVS * HORIZON


@torch.no_grad()
def test_the_newest_batch_sees_what_was_long_ago() -> None:
    seen = Watched()
    with torch.enable_grad():
        seen.run(2)
    relic, (first, second) = seen.relic, seen.batches
    relic.begun = relic.policy.initial(ENVS)
    memories: list[Tensor] = []
    for change in (0, 1):
        relic.rollout = [{**first, "obs/last_reward": first["obs/last_reward"] + change}]
        obs = under(second, "obs")
        memories.append(relic.policy.along(obs, relic.context(), second["first"])[0])
    assert (memories[0] - memories[1]).abs().amax((1, 2)).min() > 1e-4


@torch.no_grad()
def test_values_are_bootstrapped_from_the_next_step_in_context() -> None:
    seen = Watched(3)
    with torch.enable_grad():
        seen.run(1)
    relic, batch = seen.relic, seen.batches[0]
    carry, last = relic.policy.initial(ENVS), each(under(batch, "next_obs"), lambda leaf: leaf[-1:])
    _, value, following, _ = relic._evaluate_recurrent(batch, carry)
    first = torch.cat([batch["first"], torch.zeros(1, ENVS, dtype=torch.bool)])
    whole = relic.value(relic.policy.along(cat([under(batch, "obs"), last]), carry, first)[0])
    torch.testing.assert_close(value, whole[:-1])
    ended = batch["ended"]
    assert ended.any() and not ended.all()
    torch.testing.assert_close(following, torch.where(ended, whole[:-1], whole[1:]))


def test_a_sink_is_one_more_key_and_value() -> None:
    """By hand; at first it is off-by-one softmax, exp(s) / (1 + sum exp(s))."""
    torch.manual_seed(0)
    attention = CausalAttention(4, 1, 3, sink=True)
    torch.nn.init.normal_(attention.bias)
    x = torch.randn(1, 1, 4)
    keys, values = torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    age, seen = torch.tensor([[2, 1, 0]]), torch.ones(1, 1, 3, dtype=torch.bool)
    for learned in (torch.zeros(2, 4), torch.randn(2, 4)):
        assert attention.sink is not None
        attention.sink.data = learned.view(2, 1, 1, 4)
        found, _, _ = attention(x, keys, values, age, seen)
        new_key, new_value = attention.key_value(x).chunk(2, 2)
        q, k = attention.query(x)[0, 0], torch.cat([keys, new_key], 1)[0]
        weight = torch.cat([q @ learned[0][:, None] / 2, k @ q / 2 + attention.bias[0, age[0]]])
        share = weight.exp() / weight.exp().sum()
        v = torch.cat([learned[1:], torch.cat([values, new_value], 1)[0]])
        torch.testing.assert_close(found[0, 0], attention.out(share @ v))
        if not learned.any():
            rest = weight[1:].exp() / (1 + weight[1:].exp().sum())
            torch.testing.assert_close(share[1:], rest)


def test_observations_of_the_value_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"value\.obs"):
        learner(lifetimes(), value=ValueConfig(obs=("time",)))
