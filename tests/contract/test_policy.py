"""What every policy in configs/policy promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, each, nest

FILES = sorted((Path(__file__).parents[2] / "configs" / "policy").glob("*.yaml"))
ACT = Leaf((3,), low=-1.0, high=1.0)
CHOICE = Leaf((), "int64", 0, 3)
SPECS = {
    "state": Spec({"state": Leaf((5,))}, ACT, dt=0.05),
    "cameras": Spec(
        {
            "state": Leaf((5,)),
            "front": Leaf((24, 32, 3), "uint8"),
            "wrist": Leaf((16, 16, 3), "uint8"),
            "critic/contact": Leaf((2,)),
        },
        ACT,
        dt=0.05,
    ),
    "symbols": Spec(
        {
            "state": Leaf((5,)),
            "cells": Leaf((2, 2, 2), "uint8", 0, (4, 2) * 4, unit="symbol"),
            "turn": Leaf((), "int64", 0, 3, unit="symbol"),
        },
        ACT,
        dt=0.05,
    ),
}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def node(request: pytest.FixtureRequest) -> dict[str, object]:
    return yaml.safe_load(request.param.read_text())


@pytest.fixture(params=SPECS)
def policy(request: pytest.FixtureRequest, node: dict[str, object]) -> Policy:
    torch.manual_seed(0)
    built = made(node, SPECS[request.param])
    built.fit(demonstrations(built, 64))
    return built.eval()


def made(node: dict[str, object], spec: Spec) -> Policy:
    """The policy for `spec`; one that refuses continuous actions gets discrete ones."""
    try:
        return build(node, Policy, spec=spec)
    except ConfigError:
        return build(node, Policy, spec=spec.with_act(CHOICE))


def observations(spec: Spec, n: int) -> Tensors:
    return {name: observation(leaf, n) for name, leaf in spec.obs.items()}


def observation(leaf: Leaf, n: int) -> Tensor:
    if leaf.is_image:
        return torch.randint(256, (n, *leaf.shape)).to(torch.uint8)
    if leaf.is_symbol:
        drawn = torch.rand(n, leaf.size) * torch.tensor(leaf.symbols)
        return drawn.view(n, *leaf.shape).to(getattr(torch, leaf.dtype))
    return 3 * torch.randn(n, *leaf.shape) + 1


def demonstrations(policy: Policy, n: int) -> Tensors:
    """Actions that depend on the state; the last steps of some chunks are not valid."""
    obs = observations(policy.spec, n)
    if policy.spec.act == CHOICE:
        target = obs["state"][:, :4].argmax(1)
    else:
        target = torch.tanh(obs["state"][:, : policy.spec.act.size])
    valid = torch.arange(policy.chunk) < torch.randint(1, policy.chunk + 1, (n, 1))
    action = target[:, None].expand(n, policy.chunk, *target.shape[1:]).contiguous()
    return {**nest(obs, "obs"), "action": action, "valid": valid}


@torch.no_grad()
def decide(policy: Policy, obs: Tensors, noise: Tensor) -> Tensor:
    seen, carry = policy.observe(obs, policy.initial(len(noise)), noise)
    return policy.act(seen, carry, noise)[0]


def test_there_are_policies() -> None:
    assert {"gaussian", "diffusion", "flow"} <= {path.stem for path in FILES}


def test_actions_have_the_shape_and_range_of_the_contract(policy: Policy) -> None:
    obs = observations(policy.spec, 6)
    actions = decide(policy, obs, 5 * policy.sample_noise(6, explore=True))
    act = policy.spec.act
    assert actions.shape == (6, policy.chunk, *act.shape)
    assert actions.dtype == getattr(torch, act.dtype)
    if act == CHOICE:
        assert actions.min() >= 0 and actions.max() <= 3
    else:
        assert actions.abs().max() <= 1
    assert actions.float().std() > 1e-3  # it does act


def test_the_chunk_is_what_was_asked_for(node: dict[str, object]) -> None:
    policy = made({**node, "chunk": 3}, SPECS["state"])
    assert policy.chunk == 3
    shape = decide(policy, observations(policy.spec, 2), policy.sample_noise(2)).shape
    assert shape == (2, 3, *policy.spec.act.shape)


def test_the_same_noise_gives_the_same_action(policy: Policy) -> None:
    obs, noise = observations(policy.spec, 20), policy.sample_noise(20, explore=True)
    one = decide(policy, obs, noise)
    torch.manual_seed(1)
    assert torch.equal(one, decide(policy, obs, noise))
    assert not torch.equal(one, decide(policy, obs, policy.sample_noise(20, explore=True)))


def test_noise_comes_from_the_default_generator(policy: Policy) -> None:
    torch.manual_seed(3)
    one = policy.sample_noise(5, explore=True)
    torch.manual_seed(3)
    two = policy.sample_noise(5, explore=True)
    assert torch.equal(one, two) and len(one) == 5
    assert not torch.equal(two, policy.sample_noise(5, explore=True))
    calm = policy.sample_noise(5, explore=False)
    assert calm.shape == one.shape
    # Either it is its noise, or there is none without exploration.
    assert not calm.any() or 0.3 < calm.std() < 3


def test_rows_do_not_see_each_other(policy: Policy) -> None:
    obs, noise = observations(policy.spec, 3), policy.sample_noise(3, explore=True)
    together = decide(policy, obs, noise)
    for i in range(3):
        alone = decide(policy, each(obs, lambda v: v[i : i + 1]), noise[i : i + 1])  # noqa: B023
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-4, rtol=0)


def response(policy: Policy, obs: Tensors, noise: Tensor) -> Tensor:
    """What the policy makes of observations: its actions, or where these are few, and so hide a
    small influence, the loss (or, with memory, the density) of always choosing the first."""
    if policy.spec.act == CHOICE and callable(
        evaluate_sequence := getattr(policy, "evaluate_sequence", None)
    ):
        n, rows = len(noise), each(obs, lambda leaf: leaf[None])
        first = torch.ones(1, n, dtype=torch.bool)
        return evaluate_sequence(rows, torch.zeros(1, n), policy.initial(n), first)[0].detach()
    if policy.spec.act != CHOICE or type(policy).loss is Policy.loss:
        return decide(policy, obs, noise)
    shape = (len(noise), policy.chunk)
    valid = torch.ones(shape, dtype=torch.bool)
    action = torch.zeros(shape, dtype=torch.int64)
    return policy.loss({**nest(obs, "obs"), "action": action, "valid": valid}).detach()


def test_observations_matter_and_those_of_the_critic_do_not(policy: Policy) -> None:
    obs, noise = observations(policy.spec, 4), policy.sample_noise(4)
    before = response(policy, obs, noise)
    for name in obs:
        changed = {**obs, name: observations(policy.spec, 4)[name]}
        same = torch.equal(before, response(policy, changed, noise))
        assert same == name.startswith("critic/"), name
    without = {name: value for name, value in obs.items() if not name.startswith("critic/")}
    assert torch.equal(before, response(policy, without, noise))


def test_acting_leaves_no_gradients(policy: Policy) -> None:
    actions = decide(policy, observations(policy.spec, 2), policy.sample_noise(2))
    assert not actions.requires_grad
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_saved_policy_acts_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    obs, noise = observations(policy.spec, 4), policy.sample_noise(4, explore=True)
    checkpoint.save(tmp_path / "checkpoints" / "00000000", policy, 0)
    loaded = checkpoint.load_policy(tmp_path, policy.spec)
    assert torch.equal(decide(policy, obs, noise), decide(loaded, obs, noise))
    assert loaded.node == policy.node and loaded.spec == policy.spec


def test_imitation_makes_the_loss_fall(policy: Policy) -> None:
    if type(policy).loss is Policy.loss:
        pytest.xfail("has no imitation loss")
    policy.train()
    batch = demonstrations(policy, 64)
    adam = torch.optim.Adam(policy.parameters(), lr=1e-3)
    assert policy.loss(batch).shape == (64,)

    def level() -> float:
        torch.manual_seed(0)
        return float(sum(policy.loss(batch).mean().detach() for _ in range(4)))

    before = level()
    for _ in range(20):
        adam.zero_grad()
        policy.loss(batch).mean().backward()
        adam.step()
    assert level() < 0.9 * before


def test_steps_that_are_not_valid_teach_nothing(policy: Policy) -> None:
    if type(policy).loss is Policy.loss:
        pytest.xfail("has no imitation loss")
    batch = demonstrations(policy, 8)
    losses = []
    valid = batch["valid"].view(8, policy.chunk, *[1] * len(policy.spec.act.shape))
    for filler in (0, 2) if policy.spec.act == CHOICE else (0.0, 0.9):
        action = torch.where(valid, batch["action"], filler)
        torch.manual_seed(0)
        losses.append(policy.loss({**batch, "action": action}))
    # A network that sees the whole noisy chunk also sees its tail: only the error is masked.
    whole = batch["valid"].all(1)
    torch.testing.assert_close(losses[0][whole], losses[1][whole])
    policy.zero_grad()
    none = {**batch, "valid": torch.zeros_like(batch["valid"])}
    assert torch.equal(policy.loss(none), torch.zeros(8))


def test_discrete_actions_are_refused_or_played(node: dict[str, object]) -> None:
    spec = SPECS["state"].with_act(CHOICE)
    try:
        policy = build(node, Policy, spec=spec)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    actions = decide(policy, observations(spec, 4), policy.sample_noise(4))
    assert actions.dtype == torch.int64 and actions.shape == (4, policy.chunk)


def test_deciding_and_learning_stay_on_the_device(policy: Policy) -> None:
    """The meta device refuses tensors of another device, and any look at a value."""
    batch = demonstrations(policy, 4)
    policy.to("meta")
    obs = each(observations(policy.spec, 4), lambda value: value.to("meta"))
    noise = policy.sample_noise(4, explore=True)
    assert noise.is_meta and decide(policy, obs, noise).is_meta
    if type(policy).loss is not Policy.loss:
        assert policy.loss(each(batch, lambda value: value.to("meta"))).is_meta
