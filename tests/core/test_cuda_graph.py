"""Recorded updates and decisions: their inputs (anywhere); a replay is the same (on a GPU)."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks.on_gpu import updates
from benchmarks.on_gpu.rows import TINY, Scale
from benchmarks.sac import filled
from embodied.buffers.replay import ReplayBuffer
from embodied.core import cuda_graph
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, Node, build
from embodied.core.cuda_graph import decision, inputs, outputs
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from tests.builders import node_of


def test_warm_ups_and_the_recording_have_inputs_of_the_same_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch.compile` compiles anew for other strides, and must not while a graph is recorded.
    Leaves of a replay buffer's batch are columns of one tensor."""
    nothing = SimpleNamespace(replay=lambda: None)  # in place of a graph
    fake = SimpleNamespace(CUDAGraph=lambda: nothing, graph=lambda graph: nullcontext())
    monkeypatch.setattr(cuda_graph.torch, "cuda", fake)
    monkeypatch.setattr(cuda_graph, "require_gpu", lambda *rest: None)
    monkeypatch.setattr(cuda_graph, "on_side_stream", lambda function, given: function(given))
    strides: list[tuple[int, ...]] = []

    def update(batch: Tensors) -> Tensors:
        strides.append(batch["obs"].stride())
        return {"loss": batch["obs"].sum()}

    graph = cuda_graph.Graph(update)
    for _ in range(cuda_graph.WARM_UP + 1):
        graph({"obs": torch.zeros(5, 7)[:, 2:4]})
    assert strides == [(2, 1)] * (cuda_graph.WARM_UP + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", updates.SIZES)
def test_a_compiled_and_recorded_update_runs(name: str) -> None:
    device = torch.device("cuda:0")
    replay = filled(ReplayBuffer(256, device))
    small = Scale(shrink={**TINY.shrink, "batch_size": 64})
    learner = updates.learner_for(name, "compile+cuda_graph", small).to(device)
    for _ in range(16):  # every kind of update is recorded by then
        metrics = learner.update(replay.sample(learner.batch_size))
    updates.require_finite(metrics)


SPEC = Spec({"state": Leaf((5,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.05)
SMALL = {"chunk": 4, "width": 16}
NODES = [
    node_of("policies.generative.flow.Flow", **SMALL),
    node_of("policies.generative.shortcut.Shortcut", **SMALL),
    node_of("policies.generative.consistency.Consistency", **SMALL),
    node_of("policies.generative.minimal_iterative.MinimalIterative", **SMALL),
    node_of("policies.generative.diffusion.Diffusion", **SMALL),
    node_of("policies.generative.act.Act", **SMALL, ensemble=True),
    node_of(
        "policies.steering.dsrl.Dsrl",
        base=node_of("policies.generative.flow.Flow", width=16),
        inner=node_of("policies.gaussian.Gaussian", hidden=[16]),
    ),
]
each_policy = pytest.mark.parametrize("chosen", NODES, ids=lambda n: n["_target_"].split(".")[-1])


def make(chosen: Node) -> Policy:
    torch.manual_seed(0)
    return build(chosen, Policy, spec=SPEC).eval()


@each_policy
@torch.no_grad()
def test_one_dict_in_and_one_out_is_the_same_decision(chosen: Node) -> None:
    policy = make(chosen)
    obs, carry = {"state": torch.randn(3, 5)}, policy.initial(3)
    noise = policy.sample_noise(3, explore=True)
    expected = policy.observe(obs, carry, noise)
    actions, after = policy.act(*expected, noise)
    seen, found, left = outputs(decision(policy, inputs(obs, carry, noise)))
    assert torch.equal(found, actions)
    assert set(left) == set(after) and all(torch.equal(left[k], after[k]) for k in after)
    assert set(seen) == set(expected[0])


@each_policy
@torch.no_grad()
def test_a_decision_never_looks_at_a_value(chosen: Node) -> None:
    """On the meta device there are none: what passes here does not wait for a GPU either."""
    policy = make(chosen).to("meta")
    given = inputs(
        {"state": torch.zeros(3, 5, device="meta")}, policy.initial(3), policy.sample_noise(3)
    )
    assert all(value.is_meta for value in decision(policy, given).values())


def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"needs a GPU, and this policy is on the cpu$"):
        Actor(make(NODES[0]), 2, cuda_graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_policy
def test_a_replay_is_the_decision(chosen: Node) -> None:
    policy = make(chosen).cuda()
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
