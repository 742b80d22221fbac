"""Denoisers and ACT: what each network sees; generative policies keep the shares of two modes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.improvement.ways import with_steps
from embodied.learners.imitation.behavior_cloning import BehaviorCloning
from embodied.learners.imitation.behavior_cloning import Config as ModesConfig
from embodied.learners.learner import RunPlan
from embodied.policies.generative.act import Act, Config, ensembled, kl
from embodied.policies.generative.chunk_sampler import (
    Film,
    Modulated,
    ResidualMlp,
    Timed,
    UNetConfig,
)
from embodied.policies.networks.blocks import Attention, AttentionLayer
from embodied.policies.networks.encoders import Encoder
from tests.builders import make_policy, node_of
from tests.tiers import usually

SPEC = Spec({"state": Leaf((4,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.1)
NETS: list[dict[str, Any]] = [
    node_of("policies.generative.chunk_sampler.Transformer", width=16, depth=2, heads=2),
    node_of("policies.generative.chunk_sampler.UNet", channels=[8, 16, 24], groups=2, width=16),
]
POLICIES = [
    "generative.flow.Flow",
    "generative.diffusion.Diffusion",
    "generative.shortcut.Shortcut",
    "generative.consistency.Consistency",
    "generative.minimal_iterative.MinimalIterative",
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
    made = make_policy(policy, SPEC, chunk=3, net=net)
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
    made = make_policy(policy, SPEC, seed=3, chunk=2, width=16)
    torch.manual_seed(3)
    Encoder(SPEC.obs)
    net = ResidualMlp(6, 4, 16, 2, 16)
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
    ("kind", "settings", "words"),
    [
        ("UNet", {"kernel": 4}, "odd kernel"),
        ("UNet", {"channels": [12]}, "multiple of groups=8"),
        ("UNet", {"time_dim": 3}, "must be even"),
        ("Transformer", {"heads": 5}, "multiple of heads=5"),
        ("Transformer", {"layers": 5}, 'no setting "layers"'),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    kind: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(node_of(f"policies.generative.chunk_sampler.{kind}", **settings))


ACT_SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make_act(**settings: Any) -> Act:
    torch.manual_seed(0)
    return Act(Config(**{"chunk": 3, "width": 16, "heads": 2, "style": 2, **settings}), ACT_SPEC)


def test_divergence_by_hand() -> None:
    """N(1, 1) is 1/2 away from N(0, 1); N(0, 4) is (4 - 1 - 2 log 2) / 2."""
    mean, log_std = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, math.log(2)]])
    assert kl(mean, log_std).item() == pytest.approx(0.5 + 1.5 - math.log(2))
    assert kl(torch.zeros(3, 4), torch.zeros(3, 4)).tolist() == [0, 0, 0]


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicts 0.5 always: |0.5 - a| over the valid steps, and beta times 1/2 + 2."""
    policy = make_act(beta=0.1)
    posterior = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    monkeypatch.setattr(policy, "posterior", lambda *given: posterior)
    monkeypatch.setattr(policy, "predict", lambda seen, z: torch.full((2, 3, 1), 0.5))
    batch = {
        "obs/state": torch.zeros(2, 2),
        "action": torch.tensor([[[0.0], [1.0], [9.0]], [[1.0], [1.0], [1.0]]]),
        "valid": torch.tensor([[True, True, False], [False, False, False]]),
    }
    assert policy.loss(batch).tolist() == pytest.approx([0.5 + 0.1 * 2.5, 0.0])


def test_padding_says_nothing_about_the_style() -> None:
    policy = make_act()
    seen = policy.observed({"state": torch.randn(4, 2)})
    valid = torch.tensor([True, True, False]).expand(4, 3)
    action = torch.randn(4, 3, 1)
    other = torch.where(valid[..., None], action, 7.0)
    for one, two in zip(
        policy.posterior(seen, action, valid), policy.posterior(seen, other, valid), strict=True
    ):
        torch.testing.assert_close(one, two)
    shown = torch.where(valid[..., None], 7.0, action)
    assert not torch.allclose(
        policy.posterior(seen, action, valid)[0], policy.posterior(seen, shown, valid)[0]
    )


def test_a_style_is_drawn_only_where_asked() -> None:
    assert not make_act().sample_noise(5).any() and make_act().sample_noise(5, explore=True).all()
    assert make_act(prior=True).sample_noise(5).all()


def test_the_mean_of_all_predictions_by_hand() -> None:
    """Three decisions; weights exp(-m i), the oldest prediction of a step first."""
    w = math.exp(-0.5)
    third, fourth = 3 + 20 * w + 100 * w**2, 30 + 200 * w + 0
    carry = {key: torch.zeros(1, 3) for key in ("weight", "count")} | {"sum": torch.zeros(1, 3, 1)}
    played = []
    for predicted in ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0], [0.0] * 3):
        action, carry = ensembled(torch.tensor(predicted).view(1, 3, 1), carry, 0.5)
        played.append(action.item())
    last = [total / (1 + w + w**2) for total in (third, fourth)]
    assert played == pytest.approx([1, (2 + 10 * w) / (1 + w), *last])


def test_an_ensemble_decides_at_every_step_and_starts_over_with_its_row() -> None:
    policy = make_act(ensemble=True, decay=0.0)
    assert policy.chunk == 3  # what it learns from
    policy.eval()
    assert policy.chunk == 1
    actor = Actor(policy, 2)
    obs = torch.randn(4, 2, 2)
    starts = torch.tensor([[True, True], [False, False], [False, True], [False, False]])
    with torch.no_grad():
        said = [policy.predict(policy.observed({"state": o}), policy.sample_noise(2)) for o in obs]
        played = [actor({"state": o}, first) for o, first in zip(obs, starts, strict=True)]
    said = [x.clamp(-1, 1) for x in said]
    third = (said[0][0, 2] + said[1][0, 1] + said[2][0, 0]) / 3
    torch.testing.assert_close(played[2][0], third)
    torch.testing.assert_close(played[2][1], said[2][1, 0])
    torch.testing.assert_close(played[3][1], (said[2][1, 1] + said[3][1, 0]) / 2)
    assert policy.train().chunk == 3 and policy.initial(2) == {}


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    x, memory = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    seen = torch.rand(3, 5) < 0.6
    seen[:, 0] = True
    for mask in (None, seen):
        hidden = None if mask is None else ~mask
        expected, _ = theirs(x, memory, memory, key_padding_mask=hidden)
        torch.testing.assert_close(ours(x, memory, mask), expected)


def test_a_layer_is_the_sum_of_its_parts() -> None:
    torch.manual_seed(0)
    layer = AttentionLayer(8, 2, cross=True)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    own = layer.norm(x)
    h = x + layer.own(own, own)
    assert layer.cross is not None and layer.cross_norm is not None
    h = h + layer.cross(layer.cross_norm(h), memory)
    torch.testing.assert_close(layer(x, memory), h + layer.each(layer.last_norm(h)))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="width=16 must be a multiple of heads=3"):
        make_act(heads=3)


def test_gradients_reach_every_parameter() -> None:
    policy = make_act()
    batch: dict[str, Tensor] = {
        "obs/state": torch.randn(4, 2),
        "action": torch.randn(4, 3, 1),
        "valid": torch.ones(4, 3, dtype=torch.bool),
    }
    policy.loss(batch).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.parameters())


MODES_SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
SHARE, ROWS = 0.3, 4096
NODES = [("flow.Flow", (8,)), ("diffusion.Diffusion", (10,))]
NODES += [("shortcut.Shortcut", (1, 8)), ("consistency.Consistency", (1,))]


@pytest.mark.parametrize(("kind", "steps"), usually(NODES[:1], NODES))
def test_both_modes_keep_their_share(kind: str, steps: tuple[int, ...]) -> None:
    """4,000 actions of a policy that was shown -0.6 (SHARE of the time) and 0.6."""
    policy = make_policy(f"generative.{kind}", MODES_SPEC, chunk=1, width=64, steps=steps[-1])
    left = torch.rand(ROWS, 1) < SHARE
    action = torch.where(left, -0.6, 0.6) + 0.05 * torch.randn(ROWS, 1)
    valid = torch.ones(ROWS, 1, dtype=torch.bool)
    rows = {"obs/state": torch.zeros(ROWS, 1), "action": action[:, None], "valid": valid}
    learner = BehaviorCloning(ModesConfig(batch_size=256, lr=2e-3), policy, run=RunPlan(1000))
    learner.fit(rows)
    for _ in range(1000):
        index = torch.randint(ROWS, (256,))
        learner.update({key: value[index] for key, value in rows.items()})
    for count in steps:
        acting = with_steps(learner.policy, count)
        with torch.no_grad():
            noise = acting.sample_noise(4000)
            played = acting.act({"state": torch.zeros(4000, 1)}, {}, noise)[0].flatten()
        assert abs((played < 0).float().mean() - left.float().mean()) < 0.05
        near = ((played.abs() - 0.6).abs() < 0.25).float().mean()
        # One step draws a line between the modes, many steps a point.
        assert near > (0.8 if count == 1 else 0.9)
