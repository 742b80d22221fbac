"""Noisy flow and noisy diffusion: densities by brute force, and the plain policy without noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.policies.denoising_mdp.chain import DenoisingMDP
from embodied.policies.denoising_mdp.noisy_diffusion import NoisyDiffusion
from embodied.policies.denoising_mdp.noisy_flow import NoisyFlow
from embodied.policies.denoising_mdp.partial_finetune import PartialFinetune
from tests.builders import node_of

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
BASES: dict[str, dict[str, Any]] = {
    "flow": node_of("policies.generative.flow.Flow", chunk=3, steps=4, width=16),
    "one step": node_of("policies.generative.flow.Flow", chunk=3, steps=1, width=16),
    "shortcut": node_of("policies.generative.shortcut.Shortcut", chunk=3, steps=2, width=16),
    "diffusion": node_of("policies.generative.diffusion.Diffusion", chunk=3, width=16),
}


def fitted(kind: str) -> Any:
    torch.manual_seed(0)
    base = build(BASES[kind], Policy, spec=SPEC)
    rows = {"obs/state": torch.randn(50, 3), "action": torch.rand(50, 3, 2) - 0.3}
    base.fit(rows)
    return base


def noisy(kind: str, **settings: Any) -> DenoisingMDP:
    cls = NoisyDiffusion if kind == "diffusion" else NoisyFlow
    node = {
        "_target_": f"{cls.__module__}.{cls.__name__}",
        "base": BASES["flow"],
        **settings,
    }
    return cls.wrap(fitted(kind), node)


def drawn(policy: DenoisingMDP, n: int = 64) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Observations, the actions of exploring in them, and the chains."""
    obs = {"state": torch.randn(n, 3)}
    with torch.no_grad():
        actions, carry = policy.act(obs, {}, policy.sample_noise(n, explore=True))
    return obs, actions, carry["row/action"]


@pytest.mark.parametrize("kind", BASES)
def test_without_noise_it_is_its_base_bit_for_bit(kind: str) -> None:
    policy, base = noisy(kind), fitted(kind)
    obs = {"state": torch.randn(500, 3)}
    torch.manual_seed(1)
    noise = policy.sample_noise(500)
    torch.manual_seed(1)
    plain = base.act(obs, {}, base.sample_noise(500))[0]
    assert torch.equal(policy.act(obs, {}, noise)[0], plain)
    deployed = policy.inference_policy()
    assert torch.equal(deployed.act(obs, {}, noise[:, : policy.size])[0], plain)
    assert isinstance(deployed, PartialFinetune if kind == "diffusion" else type(base))
    assert not torch.equal(policy.act(obs, {}, policy.sample_noise(500, explore=True))[0], plain)


@pytest.mark.parametrize("kind", BASES)
def test_rows_with_and_without_noise_do_not_mix(kind: str) -> None:
    policy = noisy(kind)
    obs, noise = {"state": torch.randn(6, 3)}, policy.sample_noise(6, explore=True)
    noise[::2, policy.size :] = 0
    actions = policy.act(obs, {}, noise)[0]
    plain = policy.inference_policy().act(obs, {}, noise[:, : policy.size])[0]
    same = (actions == plain).flatten(1).all(1)
    assert same.tolist() == [True, False] * 3


def test_a_diffusion_policy_may_take_fewer_steps() -> None:
    """The clone of ten steps, as it acts in five."""
    policy = noisy("diffusion", steps=5, last=2)
    coarse = build(BASES["diffusion"] | {"steps": 5}, Policy, spec=SPEC)
    coarse.load_state_dict(fitted("diffusion").state_dict())
    obs, noise = {"state": torch.randn(50, 3)}, policy.sample_noise(50)
    plain = coarse.act(obs, {}, noise[:, : policy.size])[0]
    assert torch.equal(policy.act(obs, {}, noise)[0], plain)
    assert policy.inference_policy().node["base"]["steps"] == 5


def test_flow_density_is_a_product_of_normals() -> None:
    """Step by step, with the base's own velocity on the left grid, in the order of the chain."""
    policy = noisy("flow", clip=0.7)
    assert isinstance(policy, NoisyFlow)
    obs, actions, chain = drawn(policy)
    flow, features = policy.inner, policy.inner.encoder(obs)
    total = Normal(0.0, 1.0).log_prob(chain[:, 0])
    entropy = torch.full_like(total, 0.5 * math.log(2 * math.pi * math.e))
    for k in range(4):
        t = torch.full((64,), k / 4)
        mean = chain[:, k] + flow.net(chain[:, k], t, features) / 4
        limit = 1.0 if k == 3 else 0.7
        raw = policy.noise(torch.cat([flow.net.embed(t), features], 1))
        share = torch.sigmoid(2 * raw)  # (1 + tanh u) / 2
        std = (share * math.log(0.16) + (1 - share) * math.log(0.08)).exp()
        step = Normal(mean.clamp(-limit, limit), std)
        total = total + step.log_prob(chain[:, k + 1])
        entropy = entropy + step.entropy()
    log_prob, spread = policy.evaluate_actions(obs, chain)
    torch.testing.assert_close(log_prob, total.sum(1) / (5 * 6))
    torch.testing.assert_close(spread, entropy.sum(1) / (5 * 6))
    played, _ = policy.evaluate_actions(obs, chain, played=4)  # two of three control steps
    torch.testing.assert_close(played, total[:, :4].sum(1) / (5 * 4))
    torch.testing.assert_close(actions, flow.to_actions(chain[:, -1].clamp(-1, 1)))


def test_diffusion_density_is_a_product_of_normals() -> None:
    """DDIM with eta = 1 from the schedule's own numbers; deviations below the floor are raised."""
    policy = noisy("diffusion", last=4, floor=0.2)
    assert isinstance(policy, NoisyDiffusion)
    obs, _, chain = drawn(policy)
    tuned = policy.inner.tuned
    kept = tuned.sampler.alphas_cumprod
    for k, t in enumerate((30, 20, 10, 0)):
        here, there = float(kept[t]), float(kept[t - 10]) if t else 1.0
        x = chain[:, k]
        guess = tuned.net(x, torch.full((64,), t / 100), tuned.encoder(obs))
        x0 = ((x - (1 - here) ** 0.5 * guess) / here**0.5).clamp(-1, 1)
        e = (x - here**0.5 * x0) / (1 - here) ** 0.5
        sigma = ((1 - there) / (1 - here) * (1 - here / there)) ** 0.5
        mean = there**0.5 * x0 + max(1 - there - sigma**2, 0.0) ** 0.5 * e
        by_hand = Normal(mean, max(sigma, 0.2)).log_prob(chain[:, k + 1])
        found = policy.log_prob(obs, x, chain[:, k + 1], torch.full((64,), k))
        torch.testing.assert_close(found, by_hand, atol=1e-4, rtol=1e-4)
        z = (chain[:, k + 1] - mean) / max(sigma, 0.2)
        assert 0.8 < z.std() < 1.2 and z.abs().max() <= 3 + 1e-4


def test_drawn_noise_is_cut_off() -> None:
    policy = noisy("one step")
    obs = {"state": torch.randn(400, 3)}
    _, carry = policy.act(obs, {}, 20 * policy.sample_noise(400, explore=True))
    chain = carry["row/action"]
    mean, std = policy.link(
        chain[:, 0], 0, policy.times()[0], policy.encoder(obs), torch.ones(400, 1, dtype=torch.bool)
    )
    z = ((chain[:, 1] - mean) / std).abs()
    assert z.max() <= 3 + 1e-4 and (z > 2.99).float().mean() > 0.5


def test_a_relay_begins_with_the_clone_and_ends_with_the_copy() -> None:
    """Where the copy answers nothing, the last step leaves x / sqrt(abar), clipped."""
    policy = noisy("diffusion", last=1)
    relay = policy.inference_policy()
    assert isinstance(relay, PartialFinetune)
    obs, noise = {"state": torch.randn(9, 3)}, relay.sample_noise(9)
    with torch.no_grad():
        for name, parameter in relay.tuned.net.named_parameters():
            parameter.mul_(not name.startswith("leave"))
    x = relay.begin(obs, noise)
    kept = float(relay.base.sampler.alphas_cumprod[0])
    expected = relay.to_actions((x / kept**0.5).clamp(-1, 1))
    torch.testing.assert_close(relay.act(obs, {}, noise)[0], expected)
    assert not any(p.requires_grad for p in relay.base.parameters())
    assert all(p.requires_grad for p in relay.tuned.parameters())


def test_bounds_of_the_noise_hold_and_fall() -> None:
    policy = noisy("flow", low=0.05, high=0.25)
    assert isinstance(policy, NoisyFlow)
    for parameter in policy.noise.parameters():
        torch.nn.init.normal_(parameter, std=9)
    seen = torch.randn(500, 3)
    std = policy.std(policy.times()[0], seen)
    assert 0.0499 < std.min() < 0.06 and 0.24 < std.max() < 0.2501
    policy.narrow(0.5)
    assert policy.std(policy.times()[0], seen).max().item() == pytest.approx(0.15, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("noisy_flow.NoisyFlow", {"base": BASES["diffusion"]}, "not Diffusion"),
        ("noisy_flow.NoisyFlow", {"base": BASES["flow"], "low": 0.3}, "at most high=0.16"),
        ("noisy_diffusion.NoisyDiffusion", {"base": BASES["flow"]}, "not Flow"),
        ("noisy_diffusion.NoisyDiffusion", {"base": BASES["diffusion"], "last": 11}, "1..10"),
    ],
)
def test_mistakes_are_one_line(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as found:
        build(
            {"_target_": f"embodied.policies.denoising_mdp.{name}", **settings}, Policy, spec=SPEC
        )
    assert "\n" not in str(found.value)
