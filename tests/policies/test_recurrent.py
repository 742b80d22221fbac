"""Recurrent: the cell is torch's GRU, rows of time are what acting was, the past matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.networks.encoders import Encoder
from embodied.policies.recurrent import Memory, Recurrent
from tests.builders import node_of

OBS = {"state": Leaf((3,))}
ACTS = {"normal": Leaf((2,), low=-1.0, high=1.0), "categorical": Leaf((), "int64", 0, 3)}

TARGETS = {
    "normal": "embodied.policies.diagonal_gaussian.DiagonalGaussian",
    "categorical": "embodied.policies.categorical.Categorical",
}


def make(inner: str) -> Recurrent:
    torch.manual_seed(0)
    node: dict[str, Any] = node_of(
        "policies.recurrent.Recurrent", width=6, inner={"_target_": TARGETS[inner], "hidden": [5]}
    )
    return build(node, Policy, spec=Spec(OBS, ACTS[inner], dt=0.1))


def test_the_cell_is_torchs() -> None:
    torch.manual_seed(0)
    memory = Memory(Encoder(OBS), 6)
    for bias in (memory.cell.bias_ih, memory.cell.bias_hh):
        torch.nn.init.normal_(bias)
    obs, h = {"state": torch.randn(4, 3)}, torch.randn(4, 6)
    expected = memory.cell(torch.tanh(memory.enter(obs["state"])), h)
    torch.testing.assert_close(memory(obs, h), expected)


@pytest.mark.parametrize("inner", ACTS)
def test_living_through_it_again_is_what_acting_was(inner: str) -> None:
    """Step by step through the actor, with episodes that begin at any time and in any row."""
    policy = make(inner)
    actor = Actor(policy, 4, explore=True)
    obs, first = torch.randn(9, 4, 3), torch.rand(9, 4) < 0.3
    first[0] = torch.tensor([True, True, False, False])
    actor.carry["h"] = torch.randn(4, 6)
    carry = {"h": actor.carry["h"].clone()}
    actions, densities = [], []
    for t in range(9):
        actor({"state": obs[t]}, first[t])
        inside = {"memory": actor.carry["h"]}
        actions.append(actor.stored_action)
        densities.append(policy.inner.evaluate_actions(inside, actor.stored_action)[0])
    log_prob, entropy = policy.evaluate_sequence({"state": obs}, torch.stack(actions), carry, first)
    torch.testing.assert_close(log_prob, torch.stack(densities), atol=1e-6, rtol=1e-5)
    assert entropy.shape == (9, 4)


def test_the_past_matters_until_an_episode_begins() -> None:
    policy = make("normal")
    obs = {"state": torch.randn(3, 2, 3)}
    changed = {"state": obs["state"].clone()}
    changed["state"][0] += 1
    first = torch.tensor([[True, True], [False, True], [False, False]])
    h = policy.memory.initial(2)
    one, other = (policy.memory.along(o, h, first) for o in (obs, changed))
    assert not torch.equal(one[2, 0], other[2, 0])
    assert torch.equal(one[1:, 1], other[1:, 1])


def test_gradients_reach_the_first_observation() -> None:
    memory = Memory(Encoder(OBS), 6)
    obs: Tensors = {"state": torch.randn(5, 1, 3).requires_grad_()}
    first = torch.zeros(5, 1, dtype=torch.bool)
    memory.along(obs, memory.initial(1), first)[-1].sum().backward()
    assert obs["state"].grad is not None and obs["state"].grad[0].any()


def test_inner_policies_without_a_density_are_refused() -> None:
    node = node_of(
        "policies.recurrent.Recurrent", inner={"_target_": "embodied.policies.generative.flow.Flow"}
    )
    with pytest.raises(ConfigError, match="density"):
        build(node, Policy, spec=Spec(OBS, ACTS["normal"], dt=0.1))
