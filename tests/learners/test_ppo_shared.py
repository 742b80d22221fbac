"""PPO with one GRU for the policy and its critic: the same losses as PPO whose critic has a copy of
that GRU, one set of parameters, gradients of both losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.learners.critics import ValueConfig
from embodied.learners.on_policy.ppo import Ppo
from embodied.learners.on_policy.ppo_shared import Config, PpoShared
from tests.learners.test_ppo import carry_of, make, played

SETTINGS: dict[str, Any] = {"normalize": False, "batch_size": 24}


def pair() -> tuple[Ppo, PpoShared]:
    """The same policy; the other's critic has a copy of the policy's GRU and the same MLP."""
    other = make(memory=True, value={"hidden": [8], "obs": ["state"]}, **SETTINGS)
    config = Config(**SETTINGS, horizon=other.horizon, value=ValueConfig(hidden=(8,)))
    learner = PpoShared(config, other.policy, other.policy.spec)
    other.value.memory.load_state_dict(other.policy.memory.state_dict())  # type: ignore[operator,union-attr]
    other.value.net.load_state_dict(learner.value.net.state_dict())
    return other, learner


def batches(learner: Ppo) -> tuple[Tensors, Tensors, Tensors]:
    """A batch, with the carry, and the table of its minibatches."""
    batch = played(learner)
    carry = carry_of(batch)
    kept = {key: value for key, value in batch.items() if not key.startswith("carry/")}
    learner.memory = carry["h"]  # the hidden state of its critic
    return kept, carry, learner._table(kept, carry)[0]


def test_tables_and_losses_are_those_of_a_copied_gru() -> None:
    other, learner = pair()
    batch, carry, theirs = batches(other)
    ours = learner._table(batch, carry)[0]
    assert set(theirs) - set(ours) == {"memory"}
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], msg=key)
    one, said = learner._loss(ours)
    two, heard = other._loss(theirs)
    torch.testing.assert_close(one, two)
    for key in said:
        torch.testing.assert_close(said[key], heard[key], msg=key)


def test_the_gru_has_the_gradients_of_both_losses() -> None:
    other, learner = pair()
    batch, carry, theirs = batches(other)
    ours = learner._table(batch, carry)[0]
    other._loss(theirs)[0].backward()
    memories = (other.policy.memory, other.value.memory)  # type: ignore[union-attr]
    summed = [
        sum(p.grad for p in pair)
        for pair in zip(*(memory.parameters() for memory in memories), strict=True)
    ]
    other.policy.zero_grad()
    learner._loss(ours)[0].backward()
    for gradient, parameter in zip(summed, learner.actor.memory.parameters(), strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


def test_an_update_moves_all_and_nothing_is_there_twice() -> None:
    _, learner = pair()
    parameters = list(learner.parameters())
    assert len({id(p) for p in parameters}) == len(parameters)
    before = [p.clone() for p in parameters]
    metrics = learner.update(played(learner))
    assert all(torch.isfinite(value) for value in metrics.values())
    assert all(not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    values = learner.state_values({"state": torch.zeros(3, 3)})
    assert values.shape == (3,)


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(ConfigError, match="needs a recurrent policy"):
        flat = make(memory=False, **SETTINGS)
        PpoShared(Config(), flat.policy, flat.policy.spec)
    _, learner = pair()
    with pytest.raises(ConfigError, match=r"value\.obs has no effect"):
        config = Config(value=ValueConfig(obs=("state",)))
        PpoShared(config, learner.policy, learner.policy.spec)
