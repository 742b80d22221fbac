"""Transformer: the cache equals the parallel forward, episodes are apart, the window is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.policies.transformer import CausalTransformer, Transformer

OBS = {"state": Leaf((3,))}
ACTS = {"normal": Leaf((2,), low=-1.0, high=1.0), "categorical": Leaf((), "int64", 0, 3)}
TARGETS = {
    "normal": "embodied.policies.diagonal_gaussian.DiagonalGaussian",
    "categorical": "embodied.policies.categorical.Categorical",
}


def network(window: int = 4) -> CausalTransformer:
    torch.manual_seed(0)
    net = CausalTransformer(8, 2, 2, window)
    for layer in net.layers:
        torch.nn.init.normal_(layer.attention.bias)
    return net


def make(inner: str, window: int = 4) -> Transformer:
    torch.manual_seed(0)
    node: dict[str, Any] = {
        "_target_": "embodied.policies.transformer.Transformer",
        "width": 8,
        "heads": 2,
        "window": window,
        "inner": {"_target_": TARGETS[inner], "hidden": [5]},
    }
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
def test_living_through_it_again_is_what_acting_was(inner: str) -> None:
    """Step by step through the actor, with episodes that begin at any time and in any row."""
    policy = make(inner)
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


def test_mistakes_are_one_line() -> None:
    node = {"_target_": "embodied.policies.transformer.Transformer", "width": 10, "heads": 4}
    inner = {"_target_": TARGETS["normal"]}
    with pytest.raises(ConfigError, match="width=10 must be a multiple of heads=4"):
        build({**node, "inner": inner}, Policy, spec=Spec(OBS, ACTS["normal"], dt=0.1))
