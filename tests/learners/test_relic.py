"""ReLIC: partial updates see the whole context, by the parameters of now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors, cat, each, under
from embodied.envs.toy import bandit
from embodied.envs.wrappers import trials
from embodied.envs.wrappers.trials import Trials
from embodied.learners.critics import ValueConfig
from embodied.learners.on_policy.relic import Config, Relic
from embodied.policies.transformer import CausalAttention
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import make_policy, node_of

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
            _, expected = seen.relic.actor.along(under(past, "obs"), begun, past["first"])
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
        memories.append(relic.actor.along(obs, relic.context(), second["first"])[0])
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
    whole = relic._value(relic.actor.along(cat([under(batch, "obs"), last]), carry, first)[0])
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
