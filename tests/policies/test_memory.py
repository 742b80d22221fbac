"""Policies with memory, recurrent and transformer: the past, and the arithmetic of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.networks import blocks
from embodied.policies.networks.encoders import Encoder
from embodied.policies.recurrent import CausalTransformer, Memory, Recurrent, Transformer
from tests.builders import node_of

OBS = {"state": Leaf((3,))}
ACTS = {"normal": Leaf((2,), low=-1.0, high=1.0), "categorical": Leaf((), "int64", 0, 3)}

TARGETS = {
    "normal": "embodied.policies.gaussian.DiagonalGaussian",
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


def network(window: int = 4) -> CausalTransformer:
    torch.manual_seed(0)
    net = CausalTransformer(8, 2, 2, window)
    for layer in net.layers:
        torch.nn.init.normal_(layer.attention.bias)
    return net


def make_transformer(inner: str) -> Transformer:
    torch.manual_seed(0)
    node: dict[str, Any] = {"inner": {"_target_": TARGETS[inner], "hidden": [5]}}
    node |= node_of("policies.recurrent.Transformer", width=8, heads=2, window=4)
    return build(node, Policy, spec=Spec(OBS, ACTS[inner], dt=0.1))


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_steps_with_the_cache_are_the_parallel_forward(cut: int) -> None:
    """Nine steps at once, in two parts, and one by one, with episodes that begin anywhere."""
    net = network()
    x = torch.randn(5, 9, 8)
    first = torch.rand(5, 9) < 0.25
    first[:, 0] = torch.tensor([True, False, False, True, False])
    whole, last = net(x, net.empty(5), first)
    one, between = net(x[:, :cut], net.empty(5), first[:, :cut])
    parts = [one]
    if cut < 9:
        two, between = net(x[:, cut:], between, first[:, cut:])
        parts.append(two)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
    assert torch.equal(between["known"], last["known"])
    cache = net.empty(5)
    for t in range(9):
        fresh = first[:, t]
        begun = net.empty(5)
        cache = {
            key: torch.where(fresh.view(-1, *[1] * (value.ndim - 1)), begun[key], value)
            for key, value in cache.items()
        }
        found, cache = net.step(x[:, t], cache)
        torch.testing.assert_close(found, whole[:, t], atol=1e-5, rtol=1e-5)


def test_what_a_step_depends_on() -> None:
    """On the `layers` * (`window` - 1) steps before it, up to the beginning of its episode."""
    net = network(window=3)
    x = torch.randn(1, 8, 8, requires_grad=True)
    first = torch.zeros(1, 8, dtype=torch.bool)
    found, _ = net(x, net.empty(1), first)
    (grad,) = torch.autograd.grad(found[0, 6, 0], x)
    assert grad[0].any(1).tolist() == [False, False, True, True, True, True, True, False]
    first[0, 5] = True
    found, _ = net(x, net.empty(1), first)
    (grad,) = torch.autograd.grad(found[0, 6, 0], x)
    assert grad[0].any(1).tolist() == [False, False, False, False, False, True, True, False]


@pytest.mark.parametrize("inner", ACTS)
def test_transformer_living_through_it_again_is_what_acting_was(inner: str) -> None:
    """Step by step through the actor, with episodes that begin at any time and in any row."""
    policy = make_transformer(inner)
    actor = Actor(policy, 4, explore=True)
    before = torch.randn(3, 4, 3)
    for t in range(3):
        actor({"state": before[t]}, torch.full((4,), t == 0))
    carry = {key: value.clone() for key, value in actor.carry.items()}
    obs = torch.randn(9, 4, 3)
    first = torch.rand(9, 4) < 0.3
    first[0] = torch.tensor([True, True, False, False])
    actions, densities = [], []
    for t in range(9):
        kept = {
            key: torch.where(
                first[t].view(-1, *[1] * (value.ndim - 1)), policy.initial(4)[key], value
            )
            for key, value in actor.carry.items()
            if not key.startswith("row/")
        }
        memory, _ = policy.past.step(policy.enter(policy.encoder({"state": obs[t]})), kept)
        actor({"state": obs[t]}, first[t])
        actions.append(actor.stored_action)
        inside = {"memory": memory}
        densities.append(policy.inner.evaluate_actions(inside, actor.stored_action)[0])
    log_prob, entropy = policy.evaluate_sequence({"state": obs}, torch.stack(actions), carry, first)
    torch.testing.assert_close(log_prob, torch.stack(densities), atol=1e-5, rtol=1e-5)
    assert entropy.shape == (9, 4)


T, B, W = 7, 5, 6


def _inputs() -> list[Tensor]:
    """x, h, keep, weight and bias in float64; episodes begin in the middle."""
    torch.manual_seed(0)
    keep = (torch.rand(T, B, 1) > 0.3).double()
    shapes = ((T, B, 3 * W), (B, W), (3 * W, W), (3 * W,))
    x, h, weight, bias = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes)
    return [x, h, keep, weight, bias]


def _grads(unroll: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = unroll(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    wanted = [value for value in inputs if value.requires_grad]
    return [out, *torch.autograd.grad((out * weights).sum(), wanted)]


def test_both_agree() -> None:
    inputs = _inputs()
    for one, other in zip(
        _grads(blocks.unroll_gru, inputs), _grads(blocks.unroll_gru_cpu, inputs), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def test_tanh() -> None:
    x = torch.linspace(-20, 20, 10_001)
    torch.testing.assert_close(blocks.fast_tanh(x), torch.tanh(x), atol=2e-7, rtol=0)


def test_what_does_not_fit_is_refused() -> None:
    flow, normal = node_of("policies.generative.flow.Flow"), {"_target_": TARGETS["normal"]}
    for node, match in (
        (node_of("policies.recurrent.Recurrent", inner=flow), "density"),
        (
            node_of("policies.recurrent.Transformer", width=10, heads=4, inner=normal),
            "width=10 must be a multiple of heads=4",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            build(node, Policy, spec=Spec(OBS, ACTS["normal"], dt=0.1))
