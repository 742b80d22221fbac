"""The chunk queue: what each row plays, and when it decides anew. Recorded updates and decisions:
their inputs (anywhere); a replay is the same (on a GPU)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

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
from embodied.policies import gaussian
from embodied.policies.gaussian import Gaussian
from embodied.policies.generative import flow
from embodied.policies.generative.flow import Flow
from tests.builders import node_of

SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
NEVER = torch.zeros(2, dtype=torch.bool)


class Counting(Policy):
    """Plans o, o + 0.1, o + 0.2 .. and counts its decisions; noise shifts the plan."""

    spec, chunk = SPEC, 4

    def initial(self, n: int) -> Tensors:
        return {"count": torch.zeros(n, dtype=torch.int64), "row/age": torch.zeros(n)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.full((n, 1), 1000.0 if explore else 0.0)

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return {**obs, "before": carry["count"]}, carry

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        count = carry["count"] + 1
        plan = obs["state"] + noise + 0.1 * torch.arange(4)
        return plan[:, :, None], {"count": count, "row/age": 10.0 * count}


def at(*values: float) -> Tensors:
    return {"state": torch.tensor(values)[:, None]}


def flags(*values: int) -> Tensor:
    return torch.tensor(values).bool()


def played(actor: Actor, obs: Tensors, first: Tensor) -> list[float]:
    return [round(value, 4) for value in actor(obs, first).flatten().tolist()]


def test_a_chunk_is_played_and_then_comes_a_decision() -> None:
    actor = Actor(Counting(), 2, execute=3)
    assert played(actor, at(1, 2), ~NEVER) == [1.0, 2.0] and actor.decided.all()
    assert played(actor, at(50, 50), NEVER) == [1.1, 2.1] and not actor.decided.any()
    assert played(actor, at(50, 50), NEVER) == [1.2, 2.2]
    assert played(actor, at(5, 6), NEVER) == [5.0, 6.0]  # after three steps of four
    assert actor.decided.all() and actor.carry["count"].tolist() == [2, 2]


def test_one_row_begins_again_alone() -> None:
    actor = Actor(Counting(), 2)
    played(actor, at(1, 2), ~NEVER)
    assert played(actor, at(7, 8), flags(0, 1)) == [1.1, 8.0]
    assert actor.decided.tolist() == [False, True]
    assert actor.carry["count"].tolist() == [1, 1]  # row 1 starts from `initial`
    assert actor.decision_obs["state"].flatten().tolist() == [1, 8]  # what each decision saw
    assert [played(actor, at(9, 9), NEVER) for _ in range(2)] == [[1.2, 8.1], [1.3, 8.2]]
    assert played(actor, at(3, 9), NEVER) == [3.0, 8.3]  # row 0's four steps are over
    assert played(actor, at(9, 4), NEVER) == [3.1, 4.0]
    assert actor.carry["count"].tolist() == [2, 2]
    assert actor.decision_obs["before"].tolist() == [1, 1]
    every = Actor(Counting(), 2, execute=1)  # all rows decide: it also clears the carry
    played(every, at(1, 2), ~NEVER)
    assert played(every, at(3, 4), flags(1, 0)) == [3.0, 4.0]
    assert every.carry["count"].tolist() == [1, 2]


def test_choice_and_rows_are_what_a_learner_stores() -> None:
    actor = Actor(Counting(), 2, execute=2)
    played(actor, at(1, 2), ~NEVER)
    torch.testing.assert_close(actor.stored_action, torch.tensor([[1.0, 1.1], [2.0, 2.1]]))
    assert actor.extras["age"].tolist() == [10, 10]
    actor.carry["row/action"] = torch.zeros(2, 5)
    assert actor.stored_action.shape == (2, 5) and set(actor.extras) == {"age"}
    assert played(Actor(Counting(), 1, explore=True), at(1), flags(1)) == [1001.0]


def test_peek_sees_as_the_next_decision_would_and_changes_nothing() -> None:
    actor = Actor(Counting(), 2)
    played(actor, at(1, 2), ~NEVER)
    before = copy.deepcopy(actor.get_state())
    assert actor.preview(at(5, 6))["before"].tolist() == [1, 1]
    assert same(before, actor.get_state())


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_what_an_actor_cannot_do_is_refused() -> None:
    for wrong in (0, 5):
        with pytest.raises(ValueError, match=rf"execute={wrong} is not in 1\.\.4"):
            Actor(Counting(), 1, execute=wrong)
    with pytest.raises(ConfigError, match=r"needs a GPU, and this policy is on the cpu$"):
        Actor(make(NODES[0]), 2, cuda_graph=True)


def test_some_rows_deciding_equals_all_rows_deciding() -> None:
    """Rows out of step with each other play what each would play alone."""
    torch.manual_seed(0)
    policy = Gaussian(gaussian.Config(chunk=4, hidden=(16,)), SPEC)
    together = Actor(policy, 3, execute=3)
    alone = [Actor(policy, 1, execute=3) for _ in range(3)]
    for t in range(30):
        state, first = torch.randn(3, 1), torch.rand(3) < (0.2 if t else 1.0)
        actions = together({"state": state}, first)
        ones = [each({"state": state[i : i + 1]}, first[i : i + 1]) for i, each in enumerate(alone)]
        torch.testing.assert_close(actions, torch.cat(ones))
        assert together.decided.tolist() == [bool(each.decided) for each in alone]


def test_a_restored_actor_goes_on_exactly() -> None:
    torch.manual_seed(0)
    policy = Flow(flow.Config(chunk=4, width=16), SPEC)
    actor = Actor(policy, 2, execute=3)
    script = [({"state": torch.randn(2, 1)}, torch.rand(2) < 0.3) for _ in range(12)]
    actor(script[0][0], ~NEVER)
    for obs, first in script[1:4]:
        actor(obs, first)
    state, generator = actor.get_state(), torch.get_rng_state()
    went_on = [actor(obs, first) for obs, first in script[4:]]
    restored = Actor(policy, 2, execute=3)
    restored.set_state(state)
    torch.set_rng_state(generator)
    for (obs, first), expected in zip(script[4:], went_on, strict=True):
        assert torch.equal(restored(obs, first), expected)


def test_what_is_saved_is_flat_and_does_not_change_afterwards() -> None:
    actor = Actor(Counting(), 2)
    played(actor, at(1, 2), ~NEVER)
    played(actor, at(7, 8), flags(0, 1))  # from here on the rows are out of step
    state = actor.get_state()
    assert {"cursor", "plan", "carry/count", "carry/row/age", "decision_obs/state"} <= set(state)
    assert all(len(value) == 2 for value in state.values())
    before = copy.deepcopy(state)
    for _ in range(6):
        played(actor, at(3, 3), NEVER)
    assert same(before, state)


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


GRAPH_SPEC = Spec({"state": Leaf((5,))}, Leaf((3,), low=-1.0, high=1.0), dt=0.05)
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
    return build(chosen, Policy, spec=GRAPH_SPEC).eval()


@each_policy
@torch.no_grad()
def test_one_dict_in_and_one_out_is_the_same_decision(chosen: Node) -> None:
    policy = make(chosen)
    obs, carry = {"state": torch.randn(3, 5)}, policy.initial(3)
    noise = policy.sample_noise(3, explore=True)
    expected = policy.observe(obs, carry, noise)
    actions, after = policy.act(*expected, noise)
    seen, found, left = outputs(decision(policy, inputs(obs, carry, noise)))
    assert torch.equal(found, actions) and same(left, after) and set(seen) == set(expected[0])


@each_policy
@torch.no_grad()
def test_a_decision_never_looks_at_a_value(chosen: Node) -> None:
    """On the meta device there are none: what passes here does not wait for a GPU either."""
    policy = make(chosen).to("meta")
    obs = {"state": torch.zeros(3, 5, device="meta")}
    given = inputs(obs, policy.initial(3), policy.sample_noise(3))
    assert all(value.is_meta for value in decision(policy, given).values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_policy
def test_a_replay_is_the_decision(chosen: Node) -> None:
    policy = make(chosen).cuda()
    played = []
    for graph in (False, True):
        torch.manual_seed(1)
        actor = Actor(policy, 3, explore=True, cuda_graph=graph)
        for t in range(9):
            obs = {"state": torch.sin(torch.arange(15.0, device="cuda") + t).view(3, 5)}
            played.append(actor(obs, torch.full((3,), t == 0, device="cuda")))
    torch.testing.assert_close(torch.stack(played[:9]), torch.stack(played[9:]), atol=1e-5, rtol=0)
