"""Noisy flow and noisy diffusion: densities by brute force, and the plain policy without noise;
real-time chunking: weights and guidance by hand, and how old plans go on under the actor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.tensors import take
from embodied.envs.toy.two_gap import Config as GapConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.evaluation.evaluate import evaluate
from embodied.evaluation.loading import asked_for
from embodied.export.decision import Decision
from embodied.policies.denoising_mdp.chain import DenoisingMDP
from embodied.policies.denoising_mdp.noisy_diffusion import NoisyDiffusion
from embodied.policies.denoising_mdp.noisy_flow import NoisyFlow
from embodied.policies.denoising_mdp.partial_finetune import PartialFinetune
from embodied.policies.wrappers.real_time_chunking import (
    PreviousPlan,
    RealTimeChunking,
    guided_step,
    sample,
    weights,
)
from tests.builders import SPEC, make_policy, node_of

BASES: dict[str, dict[str, Any]] = {
    "flow": node_of("policies.generative.flow.Flow", chunk=3, steps=4, width=16),
    "one step": node_of("policies.generative.flow.Flow", chunk=3, steps=1, width=16),
    "shortcut": node_of("policies.generative.shortcut.Shortcut", chunk=3, steps=2, width=16),
    "diffusion": node_of("policies.generative.diffusion.Diffusion", chunk=3, width=16),
}


def fitted(kind: str) -> Any:
    torch.manual_seed(0)
    base = build(BASES[kind], Policy, spec=SPEC)
    base.fit({"obs/state": torch.randn(50, 3), "action": torch.rand(50, 3, 2) - 0.3})
    return base


def noisy(kind: str, **settings: Any) -> DenoisingMDP:
    cls = NoisyDiffusion if kind == "diffusion" else NoisyFlow
    target = f"{cls.__module__}.{cls.__name__}"
    return cls.wrap(fitted(kind), {"_target_": target, "base": BASES["flow"], **settings})


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
    mixed = policy.sample_noise(500, explore=True)  # in every second row
    mixed[::2, policy.size :] = 0
    plain = deployed.act(obs, {}, mixed[:, : policy.size])[0]
    same = (policy.act(obs, {}, mixed)[0] == plain).flatten(1).all(1)
    assert same.tolist() == [True, False] * 250


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
        found = policy.link_log_prob(obs, x, chain[:, k + 1], torch.full((64,), k))
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
def test_a_base_or_settings_that_do_not_fit_are_refused(
    name: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_policy(f"denoising_mdp.{name}", SPEC, **settings)


SMALL: dict[str, Any] = {"width": 16, "chunk": 6}
DIFFUSION = node_of("policies.generative.diffusion.Diffusion", **SMALL)
SAMPLERS: dict[str, dict[str, Any]] = {
    "flow": node_of("policies.generative.flow.Flow", **SMALL),
    "shortcut": node_of("policies.generative.shortcut.Shortcut", steps=2, **SMALL),
    "consistency": node_of("policies.generative.consistency.Consistency", steps=3, **SMALL),
    "minimal": node_of("policies.generative.minimal_iterative.MinimalIterative", **SMALL),
    "diffusion": DIFFUSION,
    "relay": node_of("policies.denoising_mdp.partial_finetune.PartialFinetune", base=DIFFUSION),
}
FLOW = SAMPLERS["flow"]


def realtime(base: dict[str, Any] = FLOW, **settings: Any) -> RealTimeChunking:
    torch.manual_seed(0)
    node = node_of("policies.wrappers.real_time_chunking.RealTimeChunking", base=base, **settings)
    policy: RealTimeChunking = build(node, RealTimeChunking, spec=SPEC)
    action = torch.rand(50, 2) * torch.tensor([0.4, 1.6]) - 0.2
    policy.fit({"obs/state": 2 * torch.randn(50, 3), "action": action.clamp(-1, 1)})
    return policy.eval()


def carried(
    policy: RealTimeChunking, followed: int | list[int], delay: int | list[int], n: int = 3
) -> dict[str, Tensor]:
    """A carry with plans in the range of what was learned."""
    plan = policy.base.range.inverse(torch.rand(n, 6, 2) * 2 - 1)
    executed, late = (torch.tensor(each).expand(n) for each in (followed, delay))
    return policy.initial(n) | {"plan": plan, "executed_steps": executed, "delay": late}


def past(left: int, delay: int, fresh: bool = False) -> PreviousPlan:
    known = torch.tensor([[delay]]), torch.tensor([[left]]), torch.tensor([[fresh]])
    return PreviousPlan(torch.zeros(1, 8, 1), *known)


def test_weights_by_hand() -> None:
    """H = 8 of which s = 3 were followed and d = 2 will be: c = 3/4, 2/4, 1/4 from step 2 on."""
    fading = [c * (math.exp(c) - 1) / (math.e - 1) for c in (0.75, 0.5, 0.25)]
    expected = torch.tensor([[1, 1, *fading, 0, 0, 0]])
    torch.testing.assert_close(weights(past(5, 2), soft=True), expected)
    assert weights(past(5, 2), soft=False).tolist() == [[1, 1, 0, 0, 0, 0, 0, 0]]
    assert not weights(past(5, 2, fresh=True), soft=True).any()
    # The plan ends before the next one is there: what is not known pulls at nothing.
    assert weights(past(1, 3), soft=True).tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert not weights(past(0, 3), soft=True).any()


@pytest.mark.parametrize("name", SAMPLERS)
def test_without_a_pull_it_is_the_base(name: str) -> None:
    """W = 0: nothing is left of the old plan, or there is none; and strides are the sampler's."""
    policy = realtime(SAMPLERS[name], delay=2)
    obs, noise = {"state": torch.randn(9, 3)}, 2 * policy.sample_noise(9)
    expected, _ = policy.base.act(obs, {}, noise)
    torch.testing.assert_close(
        policy.base.to_actions(sample(*policy.base.strides(obs, noise))), expected
    )
    for carry in (policy.initial(9), carried(policy, 6, 0, n=9)):
        plan, kept = policy.act(obs, carry, noise)
        torch.testing.assert_close(plan, expected)
        assert torch.equal(kept["plan"], plan) and not plan.requires_grad


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_pull_is_the_gradient(name: str) -> None:
    """Of half the weighted squared error, the old plan's side held: against finite differences."""
    policy = realtime(SAMPLERS[name]).double()
    noise = policy.sample_noise(2).double()
    x, strides = policy.base.strides({"state": torch.randn(2, 3).double()}, noise)
    goal, weight = torch.rand(2, 12).double() - 0.5, torch.rand(2, 12).double()
    for stride in (strides[0], strides[-1]):
        clean = stride.clean(x)
        pull = weight * (goal - clean)
        numeric = torch.zeros_like(x)
        for i in range(x.shape[1]):
            step = torch.zeros_like(x)
            step[:, i] = 1e-6
            slope = (stride.clean(x + step) - stride.clean(x - step)) / 2e-6
            numeric[:, i] = (pull * slope).sum(1)
        gain = 4.0 * stride.remain
        if stride.keep > 0:
            gain = min(gain, (stride.keep**2 + stride.remain**2) / stride.keep)
        found = guided_step(stride, goal, weight, 4.0).clean(x)
        torch.testing.assert_close(found, clean + gain * numeric, rtol=1e-5, atol=1e-7)
    assert all(p.grad is None for p in policy.parameters())


def test_no_velocity_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """v = 0: every Euler step goes the share W min(beta, w) / K of what is left to the old plan,
    w = (tau^2 + (1 - tau)^2) / (tau (1 - tau)); with W = 1 and beta = K the first arrives."""

    def still(beta: float) -> RealTimeChunking:
        policy = realtime(beta=beta)
        monkeypatch.setattr(policy.base.net, "at", lambda x, time, features: 0 * x)
        return policy

    policy, obs = still(3.0), {"state": torch.zeros(4, 3)}
    noise, carry = 0.5 * policy.sample_noise(4).clamp(-1, 1), carried(policy, 2, 2, n=4)
    weight = weights(past(4, 2), soft=True)[:, :4, None]
    goal = policy.base.range(carry["plan"])[:, 2:]
    x = noise.view(4, 6, 2)[:, :4].clone()
    for share in (3.0, min(3.0, 0.625 / 0.1875), min(3.0, 2.0), min(3.0, 0.625 / 0.1875)):
        x = x + share / 4 * weight * (goal - x)
    found = policy.base.range(policy.act(obs, carry, noise)[0])
    torch.testing.assert_close(found[:, 2:4], x[:, 2:].clamp(-1, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:, 4:], noise.view(4, 6, 2)[:, 4:])
    whole = still(100.0)
    carry = carried(whole, 0, 6, n=4)
    torch.testing.assert_close(whole.act(obs, carry, noise)[0], carry["plan"])
    all_left = PreviousPlan(carry["plan"], *(each.expand(4, 1) for each in past(6, 6)[1:]))
    torch.testing.assert_close(whole.guided_plan(obs, noise, all_left), carry["plan"])


@pytest.mark.parametrize("mode", ["guided", "hard", "naive"])
@pytest.mark.parametrize("name", ["flow", "diffusion"])
def test_plans_begin_as_what_will_have_been_done(name: str, mode: str) -> None:
    policy = realtime(SAMPLERS[name], delay=2, mode=mode)
    actor = Actor(policy, 3, execute=3)
    first = torch.ones(3, dtype=torch.bool)
    plans: list[Tensor] = []
    for step in range(9):
        if step in (4, 5):  # row 1 begins an episode in the middle of its chunk
            first = torch.tensor([False, step == 4, False])
        actor({"state": torch.randn(3, 3)}, first)
        first = torch.zeros(3, dtype=torch.bool)
        plans.append(actor.plan)
    for row, (old, new) in [(0, (2, 3)), (2, (5, 6)), (1, (2, 3)), (1, (4, 7))]:
        assert torch.equal(plans[new][row, :2], plans[old][row, 3:5]), (row, new)
        assert not torch.equal(plans[new][row, 2], plans[old][row, 5])
    restarted = plans[4][1]
    assert not torch.equal(restarted[:2], plans[3][1, 1:3])


def test_a_row_does_not_see_the_plans_of_others() -> None:
    policy = realtime(delay=2)
    obs, noise = {"state": torch.randn(3, 3)}, policy.sample_noise(3)
    carry = carried(policy, [-1, 2, 3], [2, 1, 3])
    together, _ = policy.act(obs, carry, noise)
    for i in range(3):
        seen, kept = (take(each, torch.tensor([i])) for each in (obs, carry))
        alone, _ = policy.act(seen, kept, noise[i : i + 1])
        torch.testing.assert_close(alone, together[i : i + 1], atol=1e-5, rtol=0)
    assert torch.equal(together[1, :1], carry["plan"][1, 2:3])
    assert torch.equal(together[2, :3], carry["plan"][2, 3:])


@pytest.mark.parametrize("mode", ["naive", "wait"])
def test_naive_and_waiting_by_hand(mode: str) -> None:
    obs, noise, policy = {"state": torch.randn(2, 3)}, torch.randn(2, 12), realtime(mode=mode)
    carry = carried(policy, [3, -1], 2, n=2)
    base, _ = policy.base.act(obs, {}, noise)
    plan, _ = policy.act(obs, carry, noise)
    assert torch.equal(plan[1], base[1]), "the first of an episode is there at once"
    naive = torch.cat([carry["plan"][0, 3:5], base[0, 2:]])
    wait = torch.cat([torch.zeros(2, 2), base[0, :4]])
    assert torch.equal(plan[0], naive if mode == "naive" else wait)


def test_a_plan_that_ends_too_early_goes_on_with_its_last_action() -> None:
    policy = realtime(delay=4)
    carry = carried(policy, 4, 4)
    plan, _ = policy.act({"state": torch.randn(3, 3)}, carry, policy.sample_noise(3))
    assert torch.equal(plan[0, :4], carry["plan"][0, [4, 5, 5, 5]])


def test_in_inference_mode_as_ever() -> None:
    policy = realtime(delay=2)
    obs, noise, carry = {"state": torch.randn(3, 3)}, policy.sample_noise(3), carried(policy, 2, 2)
    with torch.no_grad():
        expected, _ = policy.act(obs, carry, noise)
    with torch.inference_mode():
        obs, carry = ({k: v + 0 for k, v in each.items()} for each in (obs, carry))
        plan, kept = policy.act(obs, carry, noise + 0)
        assert torch.equal(plan, expected)
        assert torch.equal(policy.act(obs, kept, noise)[0][:, 0], plan[:, 2])


def test_around_a_trained_policy_and_what_is_refused(tmp_path: Path) -> None:
    base = realtime().base
    node = realtime(delay=3, mode="hard").node | {"base": node_of("policies.generative.act.Act")}
    policy = asked_for(base, node, tmp_path, {})
    assert isinstance(policy, RealTimeChunking) and policy.config.delay == 3 and policy.chunk == 6
    for name, value in base.state_dict().items():
        assert torch.equal(value, policy.base.state_dict()[name])
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"delay": 6}, r"delay=6 is not in 0\.\.5"),
        ({"base": {"_target_": "embodied.policies.gaussian.Gaussian", "chunk": 6}}, "mode=naive"),
    )
    for settings, line in refused:
        with pytest.raises(ConfigError, match=line):
            realtime(**settings)
    with pytest.raises(ConfigError, match=r"carries plan.*export the policy it is based on"):
        Decision(realtime())


def test_evaluation_says_how_much_actions_change() -> None:
    """Of chunks 0.0, 0.3, -0.2 by hand: |0.3|, |-0.5|, |0.2|, ... within an episode only."""

    class Same(RealTimeChunking):
        def act(
            self, obs: dict[str, Tensor], carry: dict[str, Tensor], noise: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            chunk = torch.tensor([0.0, 0.3, -0.2])[None, :, None]
            return chunk.expand(len(noise), 3, 2), carry

    env = TwoGap(GapConfig(num_envs=3, horizon=5))
    config = realtime().config
    policy = Same(type(config)(base={**FLOW, "chunk": 3}), env.spec)
    change = evaluate(policy, env, 6, seed=0).change
    assert change is not None
    torch.testing.assert_close(change, torch.full((6,), (0.3 + 0.5 + 0.2 + 0.3) / 4))
