"""A recorded decision: what goes in and out (anywhere), and that it is the decision (on a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.cuda_graph import decision, inputs, outputs
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec

SPEC = Spec({"state": Leaf((5,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.05)
NODES: list[dict[str, Any]] = [
    {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 4, "width": 16},
    {"_target_": "embodied.policies.generative.shortcut.Shortcut", "chunk": 4, "width": 16},
    {"_target_": "embodied.policies.generative.consistency.Consistency", "chunk": 4, "width": 16},
    {
        "_target_": "embodied.policies.generative.diffusion.Diffusion",
        "chunk": 4,
        "width": 16,
        "eta": 1.0,
    },
    {"_target_": "embodied.policies.generative.act.Act", "chunk": 4, "width": 16, "ensemble": True},
    {
        "_target_": "embodied.policies.steering.dsrl.Dsrl",
        "base": {"_target_": "embodied.policies.generative.flow.Flow", "width": 16},
        "inner": {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [16]},
    },
]


def make(node: dict[str, Any]) -> Policy:
    torch.manual_seed(0)
    return build(node, Policy, spec=SPEC).eval()


@pytest.mark.parametrize("node", NODES, ids=lambda node: node["_target_"].split(".")[2])
@torch.no_grad()
def test_one_dict_in_and_one_out_is_the_same_decision(node: dict[str, Any]) -> None:
    policy = make(node)
    obs, carry = {"state": torch.randn(3, 5)}, policy.initial(3)
    noise = policy.sample_noise(3, explore=True)
    expected = policy.observe(obs, carry, noise)
    actions, after = policy.act(*expected, noise)
    seen, found, left = outputs(decision(policy, inputs(obs, carry, noise)))
    assert torch.equal(found, actions)
    assert set(left) == set(after) and all(torch.equal(left[k], after[k]) for k in after)
    assert set(seen) == set(expected[0])


@pytest.mark.parametrize("node", NODES, ids=lambda node: node["_target_"].split(".")[2])
@torch.no_grad()
def test_a_decision_never_looks_at_a_value(node: dict[str, Any]) -> None:
    """On the meta device there are none: what passes here does not wait for a GPU either."""
    policy = make(node).to("meta")
    given = inputs(
        {"state": torch.zeros(3, 5, device="meta")}, policy.initial(3), policy.sample_noise(3)
    )
    assert all(value.is_meta for value in decision(policy, given).values())


def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"needs a GPU, and this policy is on the cpu$"):
        Actor(make(NODES[0]), 2, cuda_graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("node", NODES, ids=lambda node: node["_target_"].split(".")[2])
def test_a_replay_is_the_decision(node: dict[str, Any]) -> None:
    policy = make(node).cuda()
    played = []
    for graph in (False, True):
        torch.manual_seed(1)
        actor = Actor(policy, 3, explore=True, cuda_graph=graph)
        first = torch.ones(3, dtype=torch.bool, device="cuda")
        steps = []
        for t in range(9):
            obs = {"state": torch.sin(torch.arange(15.0, device="cuda") + t).view(3, 5)}
            steps.append(actor(obs, first & (t == 0)))
        played.append(torch.stack(steps))
    torch.testing.assert_close(played[0], played[1], atol=1e-5, rtol=0)
