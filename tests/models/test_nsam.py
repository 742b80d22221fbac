"""NSAM and RAMP: conditions and effects by hand, plans that can be carried out, an exact resume."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import MASK
from embodied.core.tensors import Tensors, each
from embodied.envs.toy import craft
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy.ramp import PlanFollower
from embodied.models.nsam import Nsam, affine, hull, learned
from embodied.models.numeric_planner import breadth_first, enhsp, reached
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import SPEC, make_learner, make_policy

GOAL = ({}, {craft.SWORD: 1.0})
BARE = (np.zeros(len(craft.FACTS), bool), np.zeros(len(craft.AMOUNTS)))


def holds(points: Sequence[Sequence[float]], asked: Sequence[Sequence[float]]) -> list[bool]:
    return hull(np.array(points)).hold(np.array(asked)).tolist()


def test_hulls_by_hand() -> None:
    """A point, a line, a triangle, and a triangle in a plane of three dimensions."""
    assert holds([[1, 2]], [[1, 2], [1, 2.1], [0, 2]]) == [True, False, False]
    line = [[0, 1], [2, 1]]
    assert holds(line, [[1, 1], [2, 1], [2.1, 1], [1, 1.1]]) == [True, True, False, False]
    triangle = [[0, 0], [2, 0], [0, 2]]
    assert holds(triangle, [[1, 1], [0.5, 0.5], [1.1, 1], [-0.1, 1]]) == [True, True, False, False]
    flat = [[0, 0, 5], [2, 0, 5], [0, 2, 5]]
    assert holds(flat, [[1, 1, 5], [1, 1, 4], [1.5, 1, 5]]) == [True, False, False]


def test_effects_by_hand() -> None:
    """One more, a constant, a sum that fits, and one that does not."""
    before = np.array([[0.0, 1.0], [1.0, 3.0], [2.0, 2.0], [0.0, 4.0]])
    fits = [before[:, 0] + 1, before[:, 0] * 0 + 7, before[:, 0] + 2 * before[:, 1] - 1]
    for after, weights, offset in zip(fits, ([1, 0], [0, 0], [1, 2]), (1, 7, -1), strict=True):
        found = affine(before, np.column_stack([after, before[:, 1]]))
        assert found is not None
        np.testing.assert_allclose(found[0], [weights, [0, 1]], atol=1e-9)
        np.testing.assert_allclose(found[1], [offset, 0], atol=1e-9)
    assert affine(before, np.column_stack([before[:, 0] ** 2, before[:, 1]])) is None


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_amounts_are_observed_in_float32(unit: float) -> None:
    """A tenth more of 20 or of 20,000 is a tenth more, though the differences of what is observed
    are not the same."""
    before = np.float32(unit * (20 + np.arange(5) / 10))[:, None].astype(float)
    after = np.float32(before + unit / 10).astype(float)
    found = affine(before, after)
    assert found is not None and found[0] == 1 and found[1] == pytest.approx(unit / 10, rel=1e-4)
    assert hull(before).hold(after).tolist() == [True] * 4 + [False]


def test_facts_by_hand() -> None:
    """Always at the tree, with or without a table; afterwards away from the tree."""
    facts = np.array([[True, False], [True, True]])
    after = np.array([[False, False], [False, True]])
    amounts = np.zeros((2, 1))
    model = learned(facts, amounts, after, amounts)
    assert model is not None and model.facts == {0: True} and model.sets == {0: False}
    asked = np.array([[True, True], [False, True]])
    assert model.applicable(asked, amounts).tolist() == [True, False]
    assert model.after(asked, amounts)[0].tolist() == [[False, True], [False, True]]
    assert learned(facts, amounts, np.array([[True, True], [True, False]]), amounts) is None


def explored(steps: int, seed: int = 0) -> tuple[craft.Craft, Nsam]:
    """A model of random allowed actions, of `steps` steps of 16 envs."""
    env = craft.Craft(craft.Config(num_envs=16, start="bare"))
    obs, generator = env.reset(seed), torch.Generator().manual_seed(seed)
    models = Nsam(len(craft.ACTIONS))
    for _ in range(steps):
        action = torch.multinomial(obs[MASK], 1, generator=generator).squeeze(1)
        step = env.step(action)
        models.add(action.numpy(), state(obs), state(step.next_obs))
        obs = step.obs
    return env, models


def state(obs: Tensors) -> Any:
    return obs["facts"].numpy() > 0.5, obs["amounts"].double().numpy()


def test_what_the_model_allows_is_allowed_and_does_what_it_says() -> None:
    """Precision 1 on states that were not seen; what is allowed is found out by and by."""
    env, few = explored(10)
    many = explored(100)[1]
    _, other = explored(60, seed=1)
    seen = np.unique(np.concatenate([steps for steps in other.steps if steps.size])[:, :9], axis=0)
    facts, amounts = seen[:, :4] > 0.5, seen[:, 4:]
    truly = env.allowed(torch.from_numpy(facts), torch.from_numpy(amounts).float()).numpy()
    recall: list[float] = []
    for models in (few, many):
        said = np.zeros_like(truly)
        for number, model in enumerate(models.models):
            if model is not None:
                said[:, number] = model.applicable(facts, amounts)
        assert not (said & ~truly).any()
        recall.append(float((said & truly).sum() / truly.sum()))
    assert 0 < recall[0] < recall[1]
    chop = many.models[craft.ACTIONS.index("chop")]
    assert chop is not None and chop.facts[craft.TREE]
    np.testing.assert_allclose(chop.offset, [1, 0, 0, 0, 0], atol=1e-9)


def carried_out(plan: list[int]) -> bool:
    """Whether the plan makes a sword; every step has to be allowed."""
    env = craft.Craft(craft.Config(num_envs=1, start="bare"))
    obs = env.reset(0)
    for number in plan:
        assert obs[MASK][0, number] == 1
        step = env.step(torch.tensor([number]))
        obs = step.obs
    return bool(step.log["success"])


def test_a_plan_can_be_carried_out() -> None:
    _, models = explored(60)
    plan = breadth_first(models.models, BARE, GOAL)
    assert plan is not None and 14 <= len(plan) <= 18 and carried_out(plan)
    assert breadth_first([None] * len(craft.ACTIONS), BARE, GOAL) is None
    assert breadth_first(models.models, BARE, ({craft.TREE: False}, {})) == []


@pytest.mark.skipif(importlib.util.find_spec("up_enhsp") is None, reason="up-enhsp is missing")
def test_enhsp_plans_in_the_same_model() -> None:
    _, models = explored(60)
    plan = enhsp(models.models, BARE, GOAL)
    assert plan is not None and carried_out(plan)


def ramp(env: craft.Craft, **settings: Any) -> Any:
    policy = make_policy("categorical.Categorical", env.spec, hidden=[16])
    given = {"goal": {"sword": 1}, "horizon": 32, "batch_size": 64, "epochs": 1, **settings}
    return make_learner("on_policy.ramp.Ramp", policy, RunPlan(decisions=10_000), **given)


def loop_of(learner: Any, env: craft.Craft) -> OnPolicyLoop:
    return OnPolicyLoop(Collector(env, learner.behaviour_policy(), 0.99, seed=0), learner)


def test_a_share_of_the_environments_follows_the_plan() -> None:
    env = craft.Craft(craft.Config(num_envs=4, start="bare"))
    follower = PlanFollower(make_policy("categorical.Categorical", env.spec), 0.5, 5)
    plan = [craft.ACTIONS.index(name) for name in ("to_tree", "chop")]
    there = (np.array([True, False, False, False]), np.zeros(5))
    follower.follow(plan, [BARE, there])
    carry, obs = follower.initial(4), env.reset(0)
    assert carry["cursor"].tolist() == [0, 0, 5, 5]
    noise = follower.sample_noise(4, False)
    action, carry = follower.act(obs, carry, noise)
    assert action[:2, 0].tolist() == [plan[0]] * 2 and carry["cursor"].tolist() == [1, 1, 5, 5]
    obs = env.step(torch.tensor([plan[0], craft.ACTIONS.index("to_rock"), 0, 0])).obs
    action, carry = follower.act(obs, carry, noise)
    assert action[0, 0] == plan[1] and carry["cursor"].tolist() == [2, 5, 5, 5]  # one went astray


def test_ramp_finds_a_plan_and_follows_it() -> None:
    torch.manual_seed(0)
    env = craft.Craft(craft.Config(num_envs=16, start="bare"))
    learner = ramp(env)
    loop = loop_of(learner, env)
    won = torch.zeros(16)
    for step in range(6 * 32):
        made = loop.advance()[1]
        won += made.log["success"] * (step >= 4 * 32)
    assert 14 <= int(learner.follower.steps) <= 20
    assert (won[:4] >= 2).all()
    assert reached((BARE[0], np.array([0, 0, 0, 0, 1.0])), learner.goal)


def test_it_resumes_exactly() -> None:
    def trained(updates: int, state: Any = None) -> Any:
        torch.manual_seed(0)
        env = craft.Craft(craft.Config(num_envs=8, start="bare"))
        learner = ramp(env)
        loop = loop_of(learner, env)
        if state is not None:
            learner.set_state(state[0])
            loop.set_state(state[1])
        for number in range(updates):
            torch.manual_seed(number + (0 if state is None else 3))
            for _ in range(32):
                loop.advance()
        return learner, loop

    whole, _ = trained(5)
    learner, loop = trained(3)
    other, _ = trained(2, (learner.get_state(), loop.get_state()))
    one, same = each(whole.state_dict(), torch.clone), other.state_dict()
    assert all(torch.equal(value, same[key]) for key, value in one.items())
    steps = zip(whole.models.steps, other.models.steps, strict=True)
    assert all(np.array_equal(a, b) for a, b in steps)


def test_what_it_needs() -> None:
    env = craft.Craft(craft.Config(num_envs=2))
    with pytest.raises(ConfigError, match="needs a goal"):
        ramp(env, goal={})
    with pytest.raises(ConfigError, match='"sword"'):
        ramp(env, goal={"swrd": 1})
    with pytest.raises(ConfigError, match="observation facts"):
        acting = make_policy("diagonal_gaussian.DiagonalGaussian", SPEC, hidden=[8])
        make_learner("on_policy.ramp.Ramp", acting, RunPlan(), goal={"sword": 1})
