"""UniZero and ScaleZero: the search by hand, mixtures, adapters in stages, targets, tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from embodied.checks import policy as policies
from embodied.checks.check import Check
from embodied.checks.policy import PolicySubject
from embodied.core.build import ConfigError
from embodied.core.errors import NotApplicable
from embodied.core.spec import SYMBOL, TASK_NUMBER, Leaf, Spec
from embodied.core.tensors import Tensors, nest
from embodied.envs.toy.bandit import Bandit
from embodied.envs.toy.bandit import Config as BanditConfig
from embodied.envs.toy.darkroom import Config as DarkroomConfig
from embodied.envs.toy.darkroom import Darkroom
from embodied.envs.wrappers.tasks import Config as TasksConfig
from embodied.envs.wrappers.tasks import Tasks
from embodied.policies.networks.mixture import Mixture, Staged, staged_in
from embodied.policies.tree_search import C1, C2, gumbel_like, search
from tests.builders import make_learner, make_policy, node_of
from tests.training.test_train import resumed, settings

SPEC = Spec(
    {
        "state": Leaf((3,)),
        TASK_NUMBER: Leaf((1,), "int64", 0, 1, SYMBOL),
    },
    Leaf((), "int64", 0, 2),
    dt=0.1,
)
SMALL = {"width": 8, "heads": 2, "layers": 1, "hidden": [8], "window": 4, "simulations": 4}
STEPS, ROWS = 5, 4
# The decisions of an untrained policy's search hide what is observed.
CHECKS = [check for check in policies.CHECKS if check is not policies.observations_matter]


def unizero(**more: Any) -> Any:
    return make_policy("unizero.UniZero", SPEC, **{**SMALL, **more})


def learner(policy: Any = None, **config: Any) -> Any:
    sizes = {"batch_size": 8, "horizon": STEPS, "gradient_steps": 2, "batches": 2}
    policy = unizero() if policy is None else policy
    return make_learner("on_policy.unizero.UniZeroLearner", policy, **{**sizes, **config})


def batch(seed: int = 0, **more: Tensor) -> Tensors:
    make = torch.Generator().manual_seed(seed)
    shape = (STEPS, ROWS)
    task = (torch.arange(ROWS) % 2)[None, :, None].expand(STEPS, ROWS, 1)
    seen = {"state": torch.randn(*shape, 3, generator=make), TASK_NUMBER: task}
    later = {"state": torch.randn(*shape, 3, generator=make), TASK_NUMBER: task}
    none = torch.zeros(shape, dtype=torch.bool)
    return {
        **nest(seen, "obs"),
        **nest(later, "next_obs"),
        "action": torch.randint(3, shape, generator=make),
        "reward": torch.rand(shape, generator=make),
        "discount": torch.full(shape, 0.97),
        "visits": torch.rand(*shape, 3, generator=make).softmax(2),
        **{"ended": none, "first": none, "valid": ~none},
        **more,
    }


def test_three_simulations_by_hand() -> None:
    """State s leads to 2 s + 1 + a; only action 1 at the root is rewarded, and node 2 is worth
    0.4, any other nothing."""

    def predict(state: Tensors) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, 2), 0.4 * (state["s"] == 2)

    def expand(state: Tensors, action: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        rewarded = ((state["s"] == 0) & (action == 1)).float()
        return {"s": 2 * state["s"] + 1 + action}, rewarded, torch.full((1,), 0.5)

    gumbel = torch.tensor([1.0, 0.0]).expand(1, 5, 2)
    root = {"s": torch.zeros(1)}
    values = []
    for simulations, wanted in ((1, [1, 0]), (2, [1, 1]), (3, [1, 2]), (4, [1, 3])):
        visits, value = search(
            root, torch.zeros(1, 2), predict, expand, simulations, 2, 0.01, gumbel
        )
        assert visits.tolist() == [wanted]
        values.append(value.item() * simulations)
    assert values == pytest.approx([0.0, 1.2, 1.2 + 1.0, 1.2 + 1.0 + 1.0])
    # The fourth: edge 1 has Q = 1, scaled 1; edge 0 has 0 and the larger bonus.
    rate = C1 + torch.log(torch.tensor((3 + C2 + 1) / C2)).item()
    assert 1 + 0.5 * 3**0.5 / 3 * rate > 0.5 * 3**0.5 / 2 * rate


def test_a_search_finds_the_way_that_the_policy_does_not_know() -> None:
    """Only the actions 2, 0, 1 in this order are rewarded, at the end."""

    def predict(state: Tensors) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 3), torch.zeros(2)

    def expand(state: Tensors, action: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        way = state["way"] * 3 + action
        depth = state["depth"] + 1
        rewarded = ((depth == 3) & (way == 2 * 9 + 1)).float()
        return {"way": way, "depth": depth}, rewarded, torch.full((2,), 0.9)

    root = {"way": torch.zeros(2), "depth": torch.zeros(2)}
    gumbel = gumbel_like(torch.rand(2, 401, 3, generator=torch.Generator().manual_seed(1)))
    visits, value = search(root, torch.zeros(2, 3), predict, expand, 400, 3, 0.01, gumbel)
    assert (visits.argmax(1) == 2).all() and (visits.sum(1) == 400).all()
    assert (value > 0.3).all() and (value < 0.81).all()
    narrow, _ = search(root, torch.zeros(2, 3), predict, expand, 20, 2, 0.01, gumbel)
    assert ((narrow > 0).sum(1) == 2).all(), "two of the three actions are drawn"


def test_steps_with_the_cache_are_the_sequence_of_training() -> None:
    policy = unizero(experts=2, stages=2)
    seen = batch()
    obs = {key[4:]: leaf for key, leaf in seen.items() if key.startswith("obs/")}
    flat = {key: leaf.flatten(0, 1) for key, leaf in obs.items()}
    latent = policy.latent(flat).unflatten(0, (STEPS, ROWS))
    at_latent, at_action = policy.along(latent, seen["action"], seen["first"])
    cache = policy.past.empty(ROWS)
    for t in range(STEPS):
        state = policy._known(latent[t], cache)
        torch.testing.assert_close(state["output"], at_latent[t], atol=1e-5, rtol=1e-4)
        following, reward, _ = policy.expand(state, seen["action"][t])
        wanted = policy.reward_head(at_action[t])[:, 0]
        torch.testing.assert_close(reward, wanted, atol=1e-5, rtol=1e-4)
        assert following["output"].shape == (ROWS, 8)
        own = {key: value for key, value in state.items() if key != "output"}
        _, cache = policy.past.step(policy.acted(seen["action"][t]), own)
    first = seen["first"].clone()
    first[2] = True
    anew, _ = policy.along(latent, seen["action"], first)
    torch.testing.assert_close(anew[:2], at_latent[:2])
    alone, _ = policy.along(latent[2:], seen["action"][2:], seen["first"][2:])
    torch.testing.assert_close(anew[2:], alone, atol=1e-5, rtol=1e-4)


def test_decisions_are_the_most_visited_without_exploration() -> None:
    policy = unizero()
    obs = {"state": torch.randn(6, 3), TASK_NUMBER: torch.zeros(6, 1, dtype=torch.int64)}
    action, carry = policy.act(obs, policy.initial(6), policy.sample_noise(6))
    share = carry["row/visits"]
    assert torch.equal(action[:, 0], share.argmax(1))
    torch.testing.assert_close(share.sum(1), torch.ones(6))
    again, _ = policy.act(obs, policy.initial(6), policy.sample_noise(6))
    assert torch.equal(action, again)
    torch.manual_seed(0)
    noise = policy.sample_noise(6, explore=True)
    torch.testing.assert_close(noise[:, :3].sum(1), torch.full((6,), 0.25))
    forgotten = policy.forgotten(carry)
    assert carry["known"].any() and not forgotten["known"].any()


def test_a_mixture_is_the_sum_of_the_shared_expert_and_the_chosen_one() -> None:
    torch.manual_seed(0)
    mixture = Mixture(6, 4)
    x = torch.randn(3, 7, 6)
    found = mixture(x)
    used = set()
    for at in range(3):
        for token, y in zip(x[at], found[at], strict=True):
            p = mixture.gate(token).softmax(0)
            chosen = int(p.argmax())
            used.add(chosen)
            torch.testing.assert_close(
                y, mixture.shared(token) + p[chosen] * mixture.experts[chosen](token)
            )
    assert len(used) > 1
    found.sum().backward()
    slope = mixture.gate.weight.grad
    assert slope is not None and slope.abs().sum() > 0, "the router learns"
    other = sum(p.numel() for p in mixture.experts[0].parameters())
    assert 2 * other == pytest.approx(8 * 6**2, rel=0.3), "as many active weights as an MLP"


def test_an_adapter_changes_nothing_when_its_stage_begins() -> None:
    torch.manual_seed(0)
    policy = unizero(stages=3, experts=2, rank=2, alpha=4.0)
    made = learner(policy)
    layers = staged_in(policy)
    assert len(layers) > 6 and all(isinstance(layer, Staged) for layer in layers)
    layer, x = layers[0], torch.randn(5, layers[0].layer.in_features)
    made.update(batch())
    before = layer(x)
    made._begin_stage(1)
    assert torch.equal(layer(x), before)
    weights = {name: p.clone() for name, p in policy.named_parameters()}
    made.update(batch(1))
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, weights[name])}
    own = [name for name in moved if ".past." not in f".{name}"]
    assert own, "encoder and heads go on"
    inside = {name.split(".")[-2:][0] + name.split(".")[-1] for name in moved - {*own}}
    assert not any(name.endswith(("layer.weight", "layer.bias")) for name in moved)
    assert "b0" in inside and "scales0" in inside, inside
    assert "a1" not in inside and "b1" not in inside and "scales1" not in inside
    with torch.no_grad():
        layer.b[0].normal_()
        layer.scales[1].fill_(3.0)
    whole = layer.scales[0] * layer.layer.weight + 1.2 * 2.0 * layer.b[0] @ layer.a[0]
    by_hand = functional.linear(x, whole, layer.scales[0] * layer.layer.bias)
    torch.testing.assert_close(layer(x), by_hand, atol=1e-5, rtol=1e-4)


def test_returns_of_some_steps_by_hand() -> None:
    made = learner(steps=2)
    seen = made.sequences(batch())
    seen["reward"] = torch.arange(1.0, STEPS + 1)[:, None].expand(STEPS, ROWS)
    seen["discount"] = torch.full((STEPS, ROWS), 0.5)
    seen["ended"] = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    seen["discount"][2, 1] = 0.0
    seen["ended"][2, 1:3] = True  # env 1: terminated, env 2: cut
    latent = torch.randn(STEPS, ROWS, 8)
    output, _ = made.target.along(latent, seen["action"], seen["first"])
    v = made.target.mean(made.target.value_head(output))
    found, known = made.returns(seen, latent)
    by_hand = torch.stack(
        [1 + 0.5 * (2 + 0.5 * v[2]), 2 + 0.5 * (3 + 0.5 * v[3]), 3 + 0.5 * (4 + 0.5 * v[4])]
    )
    torch.testing.assert_close(found[:3, 0], by_hand[:, 0])
    torch.testing.assert_close(found[3, 0], 4 + 0.5 * v[4, 0])
    assert found[2, 1] == 3 and found[1, 1] == 2 + 0.5 * 3, "nothing behind the end"
    torch.testing.assert_close(found[1, 2], 2 + 0.5 * v[2, 2])
    assert known[:, 2].tolist() == [1, 1, 0, 1, 0] and known[:, 1].tolist() == [1, 1, 1, 1, 0]


def test_solved_tasks_are_not_learned_and_end_a_stage() -> None:
    """Envs 0 and 2 have task 0, whose episodes of two steps return 0.8."""
    made = learner(unizero(stages=3), targets=[0.5, 0.9], stage_updates=100)
    reward = torch.full((STEPS, ROWS), 0.4)
    ended = torch.zeros(STEPS, ROWS, dtype=torch.bool)
    ended[1::2] = True
    first = torch.zeros_like(ended)
    first[0::2] = True
    parts = {"reward": reward, "ended": ended, "first": first}
    stages = []
    for seed in range(6):
        metrics = made.update(batch(seed, **parts))
        stages.append(int(metrics["stage"]))
    # Four episodes of each task per update, of which 20 are counted.
    assert stages == [0, 0, 0, 0, 1, 1] and made.solved.tolist() == [True, False]
    torch.testing.assert_close(made.recent[0], torch.full((20,), 0.8))
    assert made.solved_before == 1 and made.updates == 1
    valid = made.sequences(batch())["valid"]
    assert valid[:, 1::2].all() and not valid[:, 0::2].any()
    impatient = learner(unizero(stages=2), stage_updates=2)
    assert [int(impatient.update(batch())["stage"]) for _ in range(3)] == [0, 1, 1]


def test_an_update_learns_what_happened() -> None:
    made = learner(gradient_steps=30)
    seen = batch()
    first = made.update(seen)
    for _ in range(4):
        last = made.update(seen)
    for name in ("latent", "reward", "policy"):
        assert last[name] < first[name], name


def tasks(n: int = 4) -> Tasks:
    given = ({"arm_0": 1.0, "arm_1": 0.25}, {"arm_1": 0.5})
    return Tasks(TasksConfig(tasks=given), Bandit(BanditConfig(num_envs=n, arms=2)))


def test_each_env_has_its_task_again_and_again() -> None:
    env = tasks()
    obs = env.reset(5)
    assert obs[TASK_NUMBER].flatten().tolist() == [0, 1, 0, 1] and env.spec.task is None
    inner: Any = env.env
    means: set[float] = set()
    for _ in range(10):
        assert (
            inner.means[0::2].tolist() == [[1.0, 0.25]] * 2 and (inner.means[1::2, 1] == 0.5).all()
        )
        means.add(float(inner.means[1, 0]))
        obs = env.step(torch.zeros(4, dtype=torch.int64)).obs
        assert obs[TASK_NUMBER].flatten().tolist() == [0, 1, 0, 1]
    assert len(means) == 10, "what a task leaves open is drawn anew"
    state = env.get_state()
    first = [env.step(torch.zeros(4, dtype=torch.int64)).reward for _ in range(6)]
    env.set_state(state)
    again = [env.step(torch.zeros(4, dtype=torch.int64)).reward for _ in range(6)]
    assert torch.equal(torch.stack(first), torch.stack(again))
    alone = tasks(1)
    begun = int(alone.reset(0)[TASK_NUMBER])
    pulled = torch.zeros(1, dtype=torch.int64)
    numbers = [begun, *(int(alone.step(pulled).obs[TASK_NUMBER]) for _ in range(3))]
    assert numbers == [0, 1, 0, 1], "one env has them in turn"
    late = torch.ones(1, dtype=torch.bool)  # as TimeLimit begins an episode
    numbers = [int(alone.reset(mask=late)[TASK_NUMBER]) for _ in range(3)]
    assert numbers == [0, 1, 0], "whoever ends an episode"


def test_resume_is_exact(tmp_path: Path) -> None:
    bandit = node_of("envs.toy.bandit.Bandit", num_envs=4, arms=3)
    several = node_of("envs.wrappers.tasks.Tasks", tasks=[{"arm_0": 1.0}, {"arm_1": 1.0}])
    env = node_of("envs.wrappers.stack.Wrapped", num_envs=4, env=bandit, wrappers=[several])
    policy = node_of("policies.unizero.UniZero", **SMALL, experts=2, stages=2)
    sizes = {"horizon": 5, "batches": 2, "batch_size": 4, "gradient_steps": 1, "stage_updates": 3}
    uni = node_of("learners.on_policy.unizero.UniZeroLearner", **sizes)
    node = settings(tmp_path / "run", "on_policy", env=env, policy=policy, learner=uni, steps=120)
    resumed(node, 72)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_a_policy(check: Check) -> None:
    more = {**SMALL, "experts": 2, "stages": 2}
    try:
        check(PolicySubject(node_of("policies.unizero.UniZero", **more), SPEC))
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="choice"):
        make_policy("unizero.UniZero", SPEC.with_act(Leaf((2,), low=-1.0, high=1.0)))
    with pytest.raises(ConfigError, match="2 tasks"):
        learner(targets=[0.1])
    with pytest.raises(ConfigError, match="arm_9"):
        Tasks(TasksConfig(tasks=({"arm_9": 1.0},)), Bandit(BanditConfig(num_envs=2)))
    with pytest.raises(ConfigError, match="held out"):
        Tasks(TasksConfig(tasks=({"goal": 1.0},)), Darkroom(DarkroomConfig(num_envs=2)))
