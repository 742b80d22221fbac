"""Policies with memory, recurrent and transformer: the past, and the arithmetic of sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, where
from embodied.policies.networks import blocks
from embodied.policies.networks.encoders import Encoder
from embodied.policies.recurrent import Memory
from embodied.policies.transformer import CausalTransformer
from tests.builders import make_policy, node_of

OBS = {"state": Leaf((3,))}
ACTS = {"normal": Leaf((2,), low=-1.0, high=1.0), "categorical": Leaf((), "int64", 0, 3)}

INNER = {
    "normal": node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[5]),
    "categorical": node_of("policies.categorical.Categorical", hidden=[5]),
}


def make(kind: str, inner: str, **settings: Any) -> Any:
    spec = Spec(OBS, ACTS[inner], dt=0.1)
    return make_policy(f"{kind.lower()}.{kind}", spec, inner=INNER[inner], **settings)


def test_the_cell_is_torchs() -> None:
    torch.manual_seed(0)
    memory = Memory(Encoder(OBS), 6)
    for bias in (memory.cell.bias_ih, memory.cell.bias_hh):
        torch.nn.init.normal_(bias)
    obs, h = {"state": torch.randn(4, 3)}, torch.randn(4, 6)
    expected = memory.cell(torch.tanh(memory.enter(obs["state"])), h)
    torch.testing.assert_close(memory(obs, h), expected)


@pytest.mark.parametrize("inner", ACTS)
@pytest.mark.parametrize("kind", ["Recurrent", "Transformer"])
def test_living_through_it_again_is_what_acting_was(kind: str, inner: str) -> None:
    """Step by step through the actor, with episodes that begin at any time and in any row."""
    sizes = {"width": 6} if kind == "Recurrent" else {"width": 8, "heads": 2, "window": 4}
    policy = make(kind, inner, **sizes)
    actor = Actor(policy, 4, explore=True)
    for t in range(3):
        actor({"state": torch.randn(4, 3)}, torch.full((4,), t == 0))
    carry = {key: value.clone() for key, value in actor.carry.items()}
    obs, first = torch.randn(9, 4, 3), torch.rand(9, 4) < 0.3
    first[0] = torch.tensor([True, True, False, False])
    actions, densities = [], []
    for seen, begins in zip(obs, first, strict=True):
        kept = where(begins, policy.initial(4), actor.carry)
        if kind == "Recurrent":
            memory = policy.memory({"state": seen}, kept["h"])
        else:
            memory, _ = policy.past.step(policy.enter(policy.encoder({"state": seen})), kept)
        actor({"state": seen}, begins)
        actions.append(actor.stored_action)
        inside = {"memory": memory}
        densities.append(policy.inner.evaluate_actions(inside, actor.stored_action)[0])
    log_prob, entropy = policy.evaluate_sequence({"state": obs}, torch.stack(actions), carry, first)
    near = 1e-6 if kind == "Recurrent" else 1e-5
    torch.testing.assert_close(log_prob, torch.stack(densities), atol=near, rtol=1e-5)
    assert entropy.shape == (9, 4)


def test_the_past_matters_until_an_episode_begins() -> None:
    policy = make("Recurrent", "normal", width=6)
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
        found, cache = net.step(x[:, t], where(first[:, t], net.empty(5), cache))
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


T, B, W = 7, 5, 6


def _inputs() -> list[Tensor]:
    """x, h, keep, weight and bias in float64; episodes begin in the middle."""
    torch.manual_seed(0)
    keep = (torch.rand(T, B, 1) > 0.3).double()
    shapes = ((T, B, 3 * W), (B, W), (3 * W, W), (3 * W,))
    x, h, weight, bias = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes)
    return [x, h, keep, weight, bias]


def test_both_agree() -> None:
    """In their results and all gradients."""
    found: list[list[Tensor]] = []
    for unroll in (blocks.unroll_gru, blocks.unroll_gru_cpu):
        inputs = _inputs()
        out = unroll(*inputs)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        wanted = [value for value in inputs if value.requires_grad]
        found.append([out, *torch.autograd.grad((out * weights).sum(), wanted)])
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-10)


def test_tanh() -> None:
    x = torch.linspace(-20, 20, 10_001)
    torch.testing.assert_close(blocks.fast_tanh(x), torch.tanh(x), atol=2e-7, rtol=0)


def test_what_does_not_fit_is_refused() -> None:
    flow = node_of("policies.generative.flow.Flow")
    with pytest.raises(ConfigError, match="density"):
        make_policy("recurrent.Recurrent", Spec(OBS, ACTS["normal"], dt=0.1), inner=flow)
    with pytest.raises(ConfigError, match="width=10 must be a multiple of heads=4"):
        make("Transformer", "normal", width=10, heads=4)
