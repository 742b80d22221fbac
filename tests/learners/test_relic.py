"""ReLIC: partial updates see the whole context, by the parameters of now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, each, under
from embodied.envs.toy import bandit
from embodied.envs.wrappers import trials
from embodied.envs.wrappers.trials import Trials
from embodied.learners.critics import ValueConfig
from embodied.learners.on_policy.relic import Config, Relic
from embodied.policies.transformer import CausalAttention
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop

ENVS, HORIZON = 3, 4


def learner(env: Trials, chunks: int = 3, **settings: Any) -> Relic:
    torch.manual_seed(0)
    inner = {"_target_": "embodied.policies.categorical.Categorical", "hidden": []}
    node = {"_target_": "embodied.policies.transformer.Transformer", "width": 8, "heads": 2}
    node |= {"window": 32, "sink": True, "inner": inner}
    policy = build(node, Policy, spec=env.spec)
    sizes: dict[str, Any] = {"horizon": HORIZON, "batch_size": 8, "epochs": 1, "lr": 0.01}
    return Relic(Config(chunks=chunks, **(sizes | settings)), policy, env.spec)


def lifetimes(pulls: int = 100) -> Trials:
    """Longer than a rollout unless `pulls` says otherwise."""
    made = bandit.Bandit(bandit.Config(arms=3, num_envs=ENVS))
    return Trials(trials.Config(episodes=pulls), made)


class Watched(Relic):
    """Keeps the batches and what its updates were given."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches: list[Tensors] = []
        self.carries: list[Tensors] = []

    def update(self, batch: Tensors) -> dict[str, torch.Tensor]:
        self.batches.append(each(batch, torch.clone))
        return super().update(batch)

    def _table(self, batch: Tensors, carry: Tensors) -> Any:
        self.carries.append(each(carry, torch.clone))
        return super()._table(batch, carry)


def watched(env: Trials, **settings: Any) -> tuple[Watched, OnPolicyLoop]:
    made = learner(env, **settings)
    made.__class__ = Watched
    assert isinstance(made, Watched)
    made.batches, made.carries = [], []
    return made, OnPolicyLoop(Collector(env, made.policy, made.gamma, seed=0), made)


def run(loop: OnPolicyLoop, updates: int) -> None:
    for _ in range(updates * HORIZON):
        loop.advance()


@pytest.mark.parametrize("pulls", [100, 3])
def test_the_context_is_that_of_the_whole_past_by_the_parameters_of_now(pulls: int) -> None:
    """At each boundary, also where lifetimes end within batches."""
    relic, loop = watched(lifetimes(pulls))
    for boundary in (1, 2):
        run(loop, 1)
        seen = {key: torch.cat([part[key] for part in relic.batches]) for key in relic.batches[0]}
        obs, begun = under(seen, "obs"), relic.policy.initial(ENVS)
        assert len(seen["first"]) == boundary * HORIZON
        with torch.no_grad():
            _, expected = relic.actor.along(obs, begun, seen["first"])
        carry = loop.collector.actor.carry
        assert torch.equal(carry["known"], expected["known"])
        known = expected["known"][:, None, :, None]
        for key in ("keys", "values"):
            here, there = carry[key] * known, expected[key] * known
            torch.testing.assert_close(here, there, atol=1e-5, rtol=0)


def test_each_batch_is_learned_after_those_before_it_then_all_of_them() -> None:
    relic, loop = watched(lifetimes(), chunks=2)
    run(loop, 1)
    assert len(relic.carries) == 1 and not relic.carries[0]["known"].any()
    run(loop, 1)
    # The second batch with the context of the first, then both from the start.
    assert [int(carry["known"].sum()) for carry in relic.carries[1:]] == [ENVS * HORIZON, 0]
    assert not relic.rollout and relic.begun["known"].sum() == 2 * ENVS * HORIZON
    assert relic.done == 2 * ENVS * HORIZON
    run(loop, 1)
    assert len(relic.rollout) == 1 and relic.carries[3]["known"].sum() == 2 * ENVS * HORIZON


def test_the_newest_batch_sees_what_was_long_ago() -> None:
    relic, loop = watched(lifetimes())
    run(loop, 2)
    first, second = relic.batches
    relic.rollout, relic.begun = [first], relic.policy.initial(ENVS)
    seen, carry = under(second, "obs"), relic.context()
    with torch.no_grad():
        memory, _ = relic.actor.along(seen, carry, second["first"])
        changed = {**first, "obs/last_reward": first["obs/last_reward"] + 1}
        relic.rollout = [changed]
        other, _ = relic.actor.along(seen, relic.context(), second["first"])
    assert (memory - other).abs().amax((1, 2)).min() > 1e-4


def test_values_are_bootstrapped_from_the_next_step_in_context() -> None:
    relic, loop = watched(lifetimes(3))
    run(loop, 1)
    batch = relic.batches[0]
    carry = relic.policy.initial(ENVS)
    with torch.no_grad():
        _, value, following, _ = relic._evaluate_recurrent(batch, carry)
        obs = {
            key: torch.cat([leaf, under(batch, "next_obs")[key][-1:]])
            for key, leaf in under(batch, "obs").items()
        }
        first = torch.cat([batch["first"], torch.zeros(1, ENVS, dtype=torch.bool)])
        whole = relic._value(relic.actor.along(obs, carry, first)[0])
    torch.testing.assert_close(value, whole[:-1])
    ended = batch["ended"]
    assert ended.any() and not ended.all()
    torch.testing.assert_close(following[~ended], whole[1:][~ended])
    torch.testing.assert_close(following[ended], whole[:-1][ended])


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


def test_what_has_no_long_memory_is_refused() -> None:
    env = lifetimes()
    inner = {"_target_": "embodied.policies.categorical.Categorical", "hidden": []}
    node = {"_target_": "embodied.policies.recurrent.Recurrent", "inner": inner}
    with pytest.raises(ConfigError, match="needs a transformer"):
        Relic(Config(), build(node, Policy, spec=env.spec), env.spec)
    with pytest.raises(ConfigError, match=r"value\.obs"):
        learner(env, value=ValueConfig(obs=("time",)))
