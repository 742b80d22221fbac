"""Normalised blocks and held noise: norms, statistics, durations and densities by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.policies.block_gaussian import BatchNorm, BlockGaussian, Blocks
from tests.builders import make_policy

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def make(**settings: object) -> BlockGaussian:
    return make_policy("block_gaussian.BlockGaussian", SPEC, **{"width": 16, **settings})


def test_blocks_are_the_equation() -> None:
    """One network, written out with torch's own functions; each of several is its own."""
    torch.manual_seed(0)
    blocks = Blocks(2, 5, 6, 2, 3, expansion=2)
    for parameter in blocks.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(8, 5)
    found = blocks(x, fresh=True)
    for i in range(2):

        def norm(v: torch.Tensor, layer: BatchNorm) -> torch.Tensor:
            scale, shift = layer.scale[i, 0], layer.shift[i, 0]  # noqa: B023
            return torch.nn.functional.batch_norm(v, None, None, scale, shift, training=True)

        w = [weight[i] for weight in blocks.weights]
        n = list(blocks.norms)
        h = norm(x, n[0]) @ w[0]
        for a, b in ((1, 2), (3, 4)):
            inner = torch.relu(norm(h @ w[a], n[a]))
            h = h + torch.relu(norm(inner @ w[b], n[b]))
        h = h / h.square().mean(1, keepdim=True).sqrt() * blocks.scale[i]
        torch.testing.assert_close(found[i], h @ blocks.head[i] + blocks.bias[i])


def test_running_statistics_by_hand() -> None:
    norm = BatchNorm(1, 1, momentum=0.1)
    x = torch.tensor([[[1.0], [3.0]]])  # mean 2, variance 1 (2 where it is estimated from both)
    torch.testing.assert_close(norm(x, True), torch.tensor([[[-1.0], [1.0]]]), atol=1e-4, rtol=0)
    assert norm.mean.item() == pytest.approx(0.2)
    assert norm.var.item() == pytest.approx(0.9 * 1 + 0.1 * 2)
    expected = (x - 0.2) / math.sqrt(1.1)
    torch.testing.assert_close(norm(x, False), expected, atol=1e-3, rtol=0)
    assert norm.mean.item() == pytest.approx(0.2)  # looking does not move it


def test_projection_brings_the_norms_back() -> None:
    blocks = Blocks(2, 5, 6, 1, 3)
    for parameter in blocks.parameters():
        torch.nn.init.normal_(parameter)
    heading = copy.deepcopy(blocks.weights[1].detach())
    blocks.project()
    for weight in [*blocks.weights, blocks.head]:
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(2, weight.shape[2]))
    torch.testing.assert_close(blocks.weights[1], heading / heading.norm(dim=1, keepdim=True))
    torch.testing.assert_close(blocks.scale.square().mean(-1), torch.ones(2, 1))
    for norm in blocks.norms:
        whole = norm.scale.square().mean(-1) + norm.shift.square().mean(-1)
        torch.testing.assert_close(whole, torch.ones(2, 1))


def test_statistics_are_fresh_only_while_learning() -> None:
    policy, obs = make(), {"state": 5 + torch.randn(16, 3)}
    before = copy.deepcopy(policy.state_dict())
    with torch.no_grad():
        policy.sample(obs, policy.sample_noise(16, True))
    policy.eval().sample(obs, policy.sample_noise(16, True))
    assert all(torch.equal(before[k], v) for k, v in policy.state_dict().items())
    policy.train().sample(obs, policy.sample_noise(16, True))
    norm = policy.net.norms[0]
    torch.testing.assert_close(norm.mean[0, 0], 0.01 * obs["state"].mean(0))


def test_noise_is_held_for_as_long_as_was_drawn() -> None:
    policy = make(hold=3)
    # P(1), P(2), P(3) are 36/49, 9/49, 4/49: bounds 0.735 and 0.918, at 0.63 and 1.39 deviations
    lasts = policy.lasts(torch.tensor([-3.0, 0.0, 0.62, 0.64, 1.38, 1.40, 9.0]))
    assert lasts.tolist() == [1, 1, 1, 2, 2, 3, 3]
    carry, used = policy.initial(2), []
    longs = [(2.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    for step, (one, other) in enumerate(longs):
        fresh = torch.full((2, 2), float(step))
        noise = torch.cat([fresh, torch.tensor([[one], [other]])], 1)
        with torch.no_grad():
            _, carry = policy.act({"state": torch.zeros(2, 3)}, carry, noise)
        used.append(carry["explore/noise"][:, 0].tolist())
    # row 0 draws for 3 decisions at once; row 1 for 1, then for 2
    assert used == [[0, 0], [0, 1], [0, 1], [3, 3], [4, 4]]


def test_an_episode_begins_with_its_own_noise() -> None:
    policy = make(hold=16)
    actor = Actor(policy, 2, explore=True)
    obs = {"state": torch.zeros(2, 3)}
    actor(obs, torch.tensor([True, True]))
    actor.carry["explore/left"] = torch.tensor([9.0, 9.0])
    before = actor.carry["explore/noise"].clone()
    actor(obs, torch.tensor([False, True]))
    assert torch.equal(actor.carry["explore/noise"][0], before[0])
    assert not torch.equal(actor.carry["explore/noise"][1], before[1])
    assert actor.extras == {}  # nothing of it is stored


def test_density_by_hand_and_noise_is_used_as_given_without_a_carry() -> None:
    policy, obs = make(), {"state": torch.randn(1, 3)}
    noise = torch.tensor([[0.5, -1.0, 0.3]])
    with torch.no_grad():
        action, log_prob = policy.sample(obs, noise)
        acted, carry = policy.act(obs, {}, noise)
        mean, log_std = policy(obs)
    expected = 0.0
    for i, e in enumerate((0.5, -1.0)):
        u = mean[0, i].item() + math.exp(log_std[0, i].item()) * e
        expected += -0.5 * e * e - log_std[0, i].item() - 0.5 * math.log(2 * math.pi)
        expected -= math.log(1 - math.tanh(u) ** 2)
        assert action[0, i].item() == pytest.approx(math.tanh(u), rel=1e-5)
    assert log_prob.item() == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(acted[:, 0], torch.tanh(mean + log_std.exp() * noise[:, :2]))
    assert carry == {}


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="plain layers"):
        make().feedforward()
