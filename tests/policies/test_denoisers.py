"""Denoisers: what each network sees, and that the default one is what it always was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.nn.networks import Denoiser
from embodied.policies.generative.denoisers import Film, Modulated, Timed, UNetConfig
from embodied.policies.networks.encoders import Encoder
from tests.builders import node_of

SPEC = Spec({"state": Leaf((4,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.1)
NETS: list[dict[str, Any]] = [
    node_of("policies.generative.denoisers.Transformer", width=16, depth=2, heads=2),
    node_of("policies.generative.denoisers.UNet", channels=[8, 16, 24], groups=2, width=16),
]
POLICIES = [
    "generative.flow.Flow",
    "generative.diffusion.Diffusion",
    "generative.shortcut.Shortcut",
    "generative.consistency.Consistency",
]


def make(net: dict[str, Any], chunk: int = 4) -> Timed:
    torch.manual_seed(0)
    return build(net, Timed, chunk=chunk, action=3, features=5)


@pytest.mark.parametrize("net", NETS, ids=["transformer", "unet"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
def test_chunks_of_any_length(net: dict[str, Any], chunk: int) -> None:
    made = make(net, chunk)
    x, t, features = torch.randn(6, chunk * 3), torch.rand(6), torch.randn(6, 5)
    out = made(x, t, features)
    assert out.shape == (6, chunk * 3)
    # One embedded time for all rows is that time for each of them.
    torch.testing.assert_close(
        made.at(x, made.embed(t[:1])[0], features), made(x, t[:1].expand(6), features)
    )


@pytest.mark.parametrize("net", NETS, ids=["transformer", "unet"])
def test_every_step_sees_the_whole_chunk_the_time_and_the_features(net: dict[str, Any]) -> None:
    made = make(net)
    x = torch.randn(1, 12, requires_grad=True)
    t, features = torch.rand(1, requires_grad=True), torch.randn(1, 5, requires_grad=True)
    out = made(x, t, features).view(4, 3)
    for step in out.sum(1):
        seen = torch.autograd.grad(step, (x, t, features), retain_graph=True)
        assert all(grad.abs().min() > 0 for grad in seen)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in made.parameters())


@pytest.mark.parametrize("net", NETS, ids=["transformer", "unet"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_denoising_policy_takes_every_network(policy: str, net: dict[str, Any]) -> None:
    torch.manual_seed(0)
    node = {"_target_": f"embodied.policies.{policy}", "chunk": 3, "net": net}
    made = build(node, Policy, spec=SPEC)
    batch = {
        "obs/state": torch.randn(8, 4),
        "action": torch.randn(8, 3, 3),
        "valid": torch.ones(8, 3, dtype=torch.bool),
    }
    made.fit(batch)
    made.loss(batch).sum().backward()
    assert all(p.grad is not None for p in made.net.parameters())
    assert made.act({"state": torch.randn(2, 4)}, {}, made.sample_noise(2))[0].shape == (2, 3, 3)


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_the_default_network_is_what_it_was(policy: str) -> None:
    """Same names, same values for the same seed: checkpoints and results stay as they are."""
    torch.manual_seed(3)
    node = {"_target_": f"embodied.policies.{policy}", "chunk": 2, "width": 16}
    made = build(node, Policy, spec=SPEC)
    torch.manual_seed(3)
    Encoder(SPEC.obs)
    net = Denoiser(6, 4, 16, 2, 16)
    assert list(made.net.state_dict()) == list(net.state_dict())
    for ours, theirs in zip(made.net.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_film_by_hand() -> None:
    """scale 1 and shift 3 for every channel: 2 mish(norm(conv)) + 3 goes on."""
    torch.manual_seed(0)
    block = Film(4, 8, UNetConfig(width=2))
    torch.nn.init.zeros_(block.modulate.weight)
    with torch.no_grad():
        block.modulate.bias.copy_(torch.tensor([1.0] * 8 + [3.0] * 8))
    h = torch.randn(2, 4, 5)
    inner = 2 * functional.mish(block.norm(block.one(h))) + 3
    expected = block.short(h) + functional.mish(block.last(block.two(inner)))
    torch.testing.assert_close(block(h, torch.randn(2, 2)), expected)


def test_a_condition_scales_and_shifts_what_a_layer_sees() -> None:
    torch.manual_seed(0)
    layer = Modulated(8, 2)
    torch.nn.init.zeros_(layer.modulate.weight)
    with torch.no_grad():
        layer.modulate.bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat_interleave(8))
    h = torch.randn(2, 3, 8)
    own = 2 * functional.layer_norm(h, (8,)) + 2
    middle = h + layer.own(own, own)
    expected = middle + layer.each(4 * functional.layer_norm(middle, (8,)) + 4)
    torch.testing.assert_close(layer(h, torch.randn(2, 8)), expected)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"_target_": "embodied.policies.generative.denoisers.UNet", "kernel": 4}, "odd kernel"),
        (
            {"_target_": "embodied.policies.generative.denoisers.UNet", "channels": [12]},
            "multiple of groups=8",
        ),
        (
            {"_target_": "embodied.policies.generative.denoisers.UNet", "time_dim": 3},
            "must be even",
        ),
        (
            {"_target_": "embodied.policies.generative.denoisers.Transformer", "heads": 5},
            "multiple of heads=5",
        ),
        (
            {"_target_": "embodied.policies.generative.denoisers.Transformer", "layers": 5},
            'no setting "layers"',
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(settings)
