"""ACT: loss and ensemble by hand; the style, attention, and what padding may not do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.policies.generative.act import Act, Config, ensembled, kl
from embodied.policies.networks.attention import Attention, Layer

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(**settings: Any) -> Act:
    torch.manual_seed(0)
    return Act(Config(**{"chunk": 3, "width": 16, "heads": 2, "style": 2, **settings}), SPEC)


def test_divergence_by_hand() -> None:
    """N(1, 1) is 1/2 away from N(0, 1); N(0, 4) is (4 - 1 - 2 log 2) / 2."""
    mean, log_std = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, math.log(2)]])
    assert kl(mean, log_std).item() == pytest.approx(0.5 + 1.5 - math.log(2))
    assert kl(torch.zeros(3, 4), torch.zeros(3, 4)).tolist() == [0, 0, 0]


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicts 0.5 always: |0.5 - a| over the valid steps, and beta times 1/2 + 2."""
    policy = make(beta=0.1)
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
    policy = make()
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
    assert not make().sample_noise(5).any() and make().sample_noise(5, explore=True).all()
    assert make(prior=True).sample_noise(5).all()


def test_the_mean_of_all_predictions_by_hand() -> None:
    """Three decisions; weights exp(-m i), the oldest prediction of a step first."""
    w = math.exp(-0.5)
    carry = {key: torch.zeros(1, 3) for key in ("weight", "count")} | {"sum": torch.zeros(1, 3, 1)}
    played = []
    for predicted in ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0], [0.0] * 3):
        action, carry = ensembled(torch.tensor(predicted).view(1, 3, 1), carry, 0.5)
        played.append(action.item())
    assert played == pytest.approx(
        [
            1,
            (2 + 10 * w) / (1 + w),
            (3 + 20 * w + 100 * w**2) / (1 + w + w**2),
            (30 + 200 * w + 0) / (1 + w + w**2),
        ]
    )


def test_an_ensemble_decides_at_every_step_and_starts_over_with_its_row() -> None:
    policy = make(ensemble=True, decay=0.0)
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
    layer = Layer(8, 2, cross=True)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    own = layer.norm(x)
    h = x + layer.own(own, own)
    assert layer.cross is not None and layer.cross_norm is not None
    h = h + layer.cross(layer.cross_norm(h), memory)
    torch.testing.assert_close(layer(x, memory), h + layer.each(layer.last_norm(h)))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="width=16 must be a multiple of heads=3"):
        make(heads=3)


def test_gradients_reach_every_parameter() -> None:
    policy = make()
    batch: dict[str, Tensor] = {
        "obs/state": torch.randn(4, 2),
        "action": torch.randn(4, 3, 1),
        "valid": torch.ones(4, 3, dtype=torch.bool),
    }
    policy.loss(batch).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.parameters())
