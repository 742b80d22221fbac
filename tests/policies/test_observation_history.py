"""Observation history: what a sampler of two steps gets in a run, in a dataset and when steered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, take, under
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import past_observations
from embodied.policies.denoising_mdp.noisy_diffusion import NoisyDiffusion
from embodied.policies.denoising_mdp.noisy_flow import NoisyFlow
from tests.builders import make_policy

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
KINDS = ("flow.Flow", "shortcut.Shortcut", "consistency.Consistency", "diffusion.Diffusion")
STEPS = 3


def make(kind: str, **settings: Any) -> Any:
    given = {"chunk": 2, "width": 16, "obs_steps": STEPS, **settings}
    return make_policy(f"generative.{kind}", SPEC, **given)


def episode(policy: Policy, states: Tensor, execute: int) -> tuple[list[Tensors], list[int]]:
    """The observations of the decisions of one episode, and the steps of the decisions."""
    actor, seen, at = Actor(policy, 1, execute), list[Tensors](), list[int]()
    for step in range(len(states)):
        actor({"state": states[step][None]}, torch.tensor([step == 0]))
        if bool(actor.decided):
            seen.append(actor.decision_obs)
            at.append(step)
    return seen, at


@pytest.mark.parametrize("execute", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_a_dataset_have_the_same_past(kind: str, execute: int) -> None:
    policy, states = make(kind), torch.randn(6, 2)
    seen, at = episode(policy, states, execute)
    steps: Tensors = {"obs/state": states, "action": torch.zeros(6, 1), "reward": torch.zeros(6)}
    ends = {"state": torch.zeros(1, 2)}
    recorded = Episodes(SPEC, steps, torch.tensor([0]), torch.tensor([6]), ends)
    past = under(past_observations(recorded, {"state": STEPS - 1}), "obs")["history/state"]
    assert at == list(range(0, 6, execute))
    for obs, step in zip(seen, at, strict=True):
        of_dataset = {"state": states[step][None], "history/state": past[step][None]}
        assert torch.equal(policy.features(obs), policy.features(of_dataset))


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_each_step_side_by_side(kind: str) -> None:
    policy, states = make(kind), torch.randn(5, STEPS, 2)
    obs = {"state": states[:, -1], "history/state": states[:, :-1]}
    each = [policy.encoder({"state": states[:, i]}) for i in range(STEPS)]
    torch.testing.assert_close(policy.features(obs), torch.cat(each, 1))
    assert policy.feature_size == policy.features(obs).shape[1] == 6
    alone = policy.features({"state": states[:, -1]})
    torch.testing.assert_close(alone, torch.cat([each[-1]] * STEPS, 1))


def test_it_learns_what_depends_on_the_past_alone() -> None:
    """The action is the first element of the state two steps ago."""
    policy = make("flow.Flow", chunk=1, width=64)
    torch.manual_seed(1)
    adam = torch.optim.Adam(policy.parameters(), 3e-3)

    def batch(n: int) -> Tensors:
        past = torch.rand(n, 2, 2) - 0.5
        valid = torch.ones(n, 1, dtype=torch.bool)
        obs = {"obs/state": torch.rand(n, 2) - 0.5, "obs/history/state": past}
        return {**obs, "action": past[:, :1, :1], "valid": valid}

    for _ in range(400):
        adam.zero_grad()
        policy.loss(batch(128)).mean().backward()
        adam.step()
    test = batch(300)
    actions, _ = policy.act(under(test, "obs"), {}, policy.sample_noise(300))
    assert (actions - test["action"]).abs().mean() < 0.1  # without the past: 0.25


@pytest.mark.parametrize("kind", ["flow.Flow", "diffusion.Diffusion"])
def test_denoising_as_an_mdp_keeps_the_past(kind: str) -> None:
    base, cls = make(kind), NoisyFlow if kind == "flow.Flow" else NoisyDiffusion
    name = "noisy_flow.NoisyFlow" if kind == "flow.Flow" else "noisy_diffusion.NoisyDiffusion"
    policy = cls.wrap(
        base, {"_target_": f"embodied.policies.denoising_mdp.{name}", "base": base.node}
    )
    obs, noise = {"state": torch.randn(4, 2)}, policy.sample_noise(4)
    carry = policy.initial(4)
    carry = carry | {"history/state": torch.randn(4, 2, 2), "fresh": torch.zeros(4).bool()}
    seen, carry = policy.observe(obs, carry, noise)
    plain = base.act(seen, {}, noise[:, : policy.size])[0]
    assert torch.equal(policy.act(seen, carry, noise)[0], plain)
    assert policy.augments and not torch.equal(policy.features(seen), policy.features(obs))
    _, chained = policy.act(seen, carry, noise)
    log_prob, _ = policy.evaluate_actions(seen, chained["row/action"])
    assert log_prob.shape == (4,) and set(policy.inference_policy().initial(2)) == {
        "history/state",
        "fresh",
    }


def test_one_step_needs_no_memory_and_one_observation_is_the_least() -> None:
    policy = make("flow.Flow", obs_steps=1)
    assert policy.initial(3) == {} and not policy.augments
    obs = take({"state": torch.randn(4, 2)}, torch.arange(4))
    assert torch.equal(policy.features(obs), policy.encoder(obs))
    with pytest.raises(ConfigError, match=r"flow\.obs_steps=1"):
        flow = make("flow.Flow").node
        build(
            {"_target_": "embodied.policies.generative.one_step.OneStep", "flow": flow},
            Policy,
            spec=SPEC,
        )
