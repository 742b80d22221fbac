"""Real-time chunking: weights and guidance by hand, and how old plans go on under the actor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.commands.eval import asked_for
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.envs.toy.two_gap import Config as GapConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.evaluation.evaluate import evaluate
from embodied.export.decision import Decision
from embodied.policies.wrappers.real_time_chunking import (
    PreviousPlan,
    RealTimeChunking,
    guided_step,
    sample,
    weights,
)
from tests.builders import node_of

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
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


def carried(policy: RealTimeChunking, n: int, followed: int, delay: int) -> dict[str, Tensor]:
    """A carry with plans in the range of what was learned."""
    plan = policy.base.range.inverse(torch.rand(n, 6, 2) * 2 - 1)
    return {
        **policy.initial(n),
        "plan": plan,
        "executed_steps": torch.full((n,), followed),
        "delay": torch.full((n,), delay),
    }


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
    for carry in (policy.initial(9), carried(policy, 9, followed=6, delay=0)):
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
    policy = realtime(beta=3.0)
    monkeypatch.setattr(policy.base.net, "at", lambda x, time, features: 0 * x)
    obs, noise = {"state": torch.zeros(4, 3)}, 0.5 * policy.sample_noise(4).clamp(-1, 1)
    carry = carried(policy, 4, followed=2, delay=2)
    goal = policy.base.range(carry["plan"]).flatten(1).view(4, 6, 2)[:, 2:]
    weight = weights(PreviousPlan(carry["plan"], *columns(2, 4)), soft=True)
    x = noise.view(4, 6, 2)[:, :4].clone()
    for share in (3.0, min(3.0, 0.625 / 0.1875), min(3.0, 2.0), min(3.0, 0.625 / 0.1875)):
        x = x + share / 4 * weight[:, :4, None] * (goal - x)
    found = policy.base.range(policy.act(obs, carry, noise)[0])
    torch.testing.assert_close(found[:, 2:4], x[:, 2:].clamp(-1, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:, 4:], noise.view(4, 6, 2)[:, 4:])
    all_of_it = realtime(beta=100.0)
    monkeypatch.setattr(all_of_it.base.net, "at", lambda x, time, features: 0 * x)
    whole = carried(all_of_it, 4, followed=0, delay=6)
    torch.testing.assert_close(all_of_it.act(obs, whole, noise)[0], whole["plan"])
    pulled_only = all_of_it.guided_plan(obs, noise, PreviousPlan(whole["plan"], *columns(6, 6)))
    torch.testing.assert_close(pulled_only, whole["plan"])


def columns(delay: int, left: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of four rows."""
    fresh = torch.zeros(4, 1, dtype=torch.bool)
    return torch.full((4, 1), delay), torch.full((4, 1), left), fresh


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
    carry = carried(policy, 3, followed=2, delay=2)
    carry["executed_steps"], carry["delay"] = torch.tensor([-1, 2, 3]), torch.tensor([2, 1, 3])
    together, _ = policy.act(obs, carry, noise)
    for i in range(3):
        one = {key: value[i : i + 1] for key, value in carry.items()}
        alone, _ = policy.act({"state": obs["state"][i : i + 1]}, one, noise[i : i + 1])
        torch.testing.assert_close(alone, together[i : i + 1], atol=1e-5, rtol=0)
    assert torch.equal(together[1, :1], carry["plan"][1, 2:3])
    assert torch.equal(together[2, :3], carry["plan"][2, 3:])


def test_naive_and_waiting_by_hand() -> None:
    obs, noise = {"state": torch.randn(2, 3)}, torch.randn(2, 12)
    for mode in ("naive", "wait"):
        policy = realtime(delay=2, mode=mode)
        carry = carried(policy, 2, followed=3, delay=2)
        carry["executed_steps"] = torch.tensor([3, -1])
        base, _ = policy.base.act(obs, {}, noise)
        plan, _ = policy.act(obs, carry, noise)
        assert torch.equal(plan[1], base[1]), "the first of an episode is there at once"
        if mode == "naive":
            expected = torch.cat([carry["plan"][0, 3:5], base[0, 2:]])
        else:
            expected = torch.cat([torch.zeros(2, 2), base[0, :4]])
        assert torch.equal(plan[0], expected)


def test_a_plan_that_ends_too_early_goes_on_with_its_last_action() -> None:
    policy = realtime(delay=4)
    carry = carried(policy, 1, followed=4, delay=4)
    plan, _ = policy.act({"state": torch.randn(1, 3)}, carry, policy.sample_noise(1))
    assert torch.equal(plan[0, :4], carry["plan"][0, [4, 5, 5, 5]])


def test_in_inference_mode_as_ever() -> None:
    policy = realtime(delay=2)
    obs, noise = {"state": torch.randn(3, 3)}, policy.sample_noise(3)
    carry = carried(policy, 3, followed=2, delay=2)
    with torch.no_grad():
        expected, _ = policy.act(obs, carry, noise)
    with torch.inference_mode():
        made = {key: value + 0 for key, value in carry.items()}
        actor = Actor(policy, 3, execute=2)
        plan, kept = policy.act({"state": obs["state"] + 0}, made, noise + 0)
        assert torch.equal(plan, expected)
        assert torch.equal(
            policy.act({"state": obs["state"] + 0}, kept, noise)[0][:, 0], plan[:, 2]
        )
        for step in range(5):
            actor({"state": obs["state"] + step}, torch.full((3,), step == 0))


def test_an_actor_goes_on_exactly(tmp_path: Path) -> None:
    policy = realtime(delay=2)
    checkpoint.save(tmp_path / "1", policy, 1)
    again = checkpoint.load_policy(tmp_path / "1", SPEC)
    one, two = Actor(policy, 2, execute=3), Actor(again, 2, execute=3)
    obs = {"state": torch.randn(2, 3)}
    for step in range(4):
        one(obs, torch.full((2,), step == 0))
    two.set_state({key: value.clone() for key, value in one.get_state().items()})
    none = torch.zeros(2, dtype=torch.bool)
    for _ in range(6):
        torch.manual_seed(1)
        expected = one(obs, none)
        torch.manual_seed(1)
        assert torch.equal(expected, two(obs, none))


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
