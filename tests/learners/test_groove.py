"""GROOVE: tables that a learned rule changes, the gradient of the rule, lifetimes and regret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors, nest
from tests.builders import make_learner, make_policy, node_of
from tests.training.test_train import resumed, settings

AGENTS, STATES, ACTIONS, STEPS = 3, 8, 3, 6
SPEC = Spec(
    {
        "cell": Leaf((1,), "uint8", 0, STATES // 2 - 1, SYMBOL),
        "facing": Leaf((1,), "uint8", 0, 1, SYMBOL),
        "first": Leaf((1,), low=0.0, high=1.0),
    },
    Leaf((), "int64", 0, ACTIONS - 1),
    dt=0.1,
)


def groove(**config: Any) -> Any:
    torch.manual_seed(0)
    policy = make_policy("tabular.Tabular", SPEC, agents=AGENTS, classes=4, width=8)
    return make_learner("on_policy.groove.Groove", policy, **{"episodes": 4, **config})


def batch(seed: int, over: Tensor | None = None, ended: Tensor | None = None) -> Tensors:
    """Steps [T, B]; `over`: an inner episode ended, `ended`: the lifetime."""
    make = torch.Generator().manual_seed(seed)
    none = torch.zeros(STEPS, AGENTS, dtype=torch.bool)
    over = none if over is None else over

    def seen(first: Tensor) -> Tensors:
        cell = torch.randint(STATES // 2, (STEPS, AGENTS, 1), generator=make, dtype=torch.uint8)
        facing = torch.randint(2, (STEPS, AGENTS, 1), generator=make, dtype=torch.uint8)
        return {"cell": cell, "facing": facing, "first": first.float()[..., None]}

    return {
        **nest(seen(none), "obs"),
        **nest(seen(over), "next_obs"),
        "action": torch.randint(ACTIONS, (STEPS, AGENTS), generator=make),
        "reward": torch.randn(STEPS, AGENTS, generator=make),
        "ended": none if ended is None else ended,
    }


def test_an_agent_acts_by_its_own_table() -> None:
    policy = groove().policy
    assert policy.counts == [STATES // 2, 2]
    policy.logits[1, 5, 2] = 9.0
    obs = {"cell": torch.full((4, 1), 2), "facing": torch.ones(4, 1), "first": torch.zeros(4, 1)}
    assert policy.state(obs).tolist() == [5] * 4
    assert policy.act(obs, {}, policy.sample_noise(4))[0].tolist() == [[0], [2], [0], [0]]


def test_tables_descend_the_loss_that_the_rule_gives() -> None:
    learner = groove(agent_lr=0.7)
    rollout = learner.rollout(batch(1))
    logits, predictions = (torch.randn(AGENTS, STATES, k, requires_grad=True) for k in (ACTIONS, 4))
    moved, turned, _ = learner.ruled(logits, predictions, rollout)
    rows = torch.arange(AGENTS)
    pi = logits[rows, rollout["state"]].log_softmax(2)
    log = pi.gather(2, rollout["action"][..., None])[..., 0]
    y = predictions[rows, rollout["state"]].log_softmax(2)
    after = predictions[rows, rollout["next"]].softmax(2).detach()
    rule = learner.policy.rule
    g, u = rule(rollout["reward"], rollout["over"], log.exp().detach(), y.exp().detach(), after)
    gap = functional.kl_div(u.detach().log_softmax(2), y, reduction="none", log_target=True)
    loss = (g.detach() * log).sum() + 0.5 * gap.sum()
    a, b = torch.autograd.grad(loss, [logits, predictions])
    torch.testing.assert_close(moved, logits - 0.7 / STEPS * a)
    torch.testing.assert_close(turned, predictions - 0.7 / STEPS * b)


def test_the_rule_reads_a_rollout_backwards_and_no_further_than_it_may() -> None:
    rule = groove().policy.rule
    reward, y = torch.zeros(5, 1), torch.rand(5, 1, 4).softmax(2)
    over = torch.tensor([0, 0, 1, 0, 0])[:, None].bool()
    g, _ = rule(reward, over, torch.ones(5, 1), y, y)
    reward[3] = 1.0
    later, _ = rule(reward, over, torch.ones(5, 1), y, y)
    assert (g != later).squeeze(1).tolist() == [True, True, True, True, False]
    other = y.clone()
    other[2] = torch.rand(1, 4).softmax(1)
    assert torch.equal(rule(reward, over, torch.ones(5, 1), y, other)[0], later), "past an end"


def taught(learner: Any, n: int) -> Tensors:
    """Let all agents be taught in `n` updates; the rollout that judges them."""
    learner.taught[:] = True
    for seed in range(n):
        learner.learn(learner.rollout(batch(seed)))
    return learner.rollout(batch(99))


@pytest.mark.parametrize(("unroll", "near"), [(1, 1e-6), (3, 1e-2)])
def test_the_gradient_of_the_rule_goes_through_the_updates_of_the_agents(
    unroll: int, near: float
) -> None:
    """Against differences of the loss, which see of a chain also what later rules read."""

    def loss_at(change: float) -> tuple[float, float]:
        learner = groove(unroll=unroll, agent_lr=0.5).double()
        learner.begin_window()
        weight = learner.policy.rule.head.weight
        weight.data[0, 3] += change
        loss, _ = learner.rule_loss(as_double(taught(learner, unroll)))
        (slope,) = torch.autograd.grad(loss, [weight])
        return loss.item(), slope[0, 3].item()

    def as_double(rollout: Tensors) -> Tensors:
        return {key: v.double() if v.is_floating_point() else v for key, v in rollout.items()}

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        slope = (loss_at(1e-5)[0] - loss_at(-1e-5)[0]) / 2e-5
        assert loss_at(0.0)[1] == pytest.approx(slope, rel=near) and abs(slope) > 1e-6
    finally:
        torch.set_default_dtype(default)


def test_an_agent_that_begins_anew_does_not_teach_the_rule() -> None:
    learner = groove(unroll=2)
    rollout = taught(learner, 2)
    learner._begin(torch.tensor([True, False, False]))
    assert not learner.policy.logits[0].any() and learner.policy.logits[1].any()
    whole = torch.stack([each["taught"][0] for each in learner.window])
    assert whole.all(0).tolist() == [False, True, True]
    before = learner.policy.rule.head.weight.clone()
    assert learner.teach(rollout)["taught"].item() == pytest.approx(2 / 3)
    assert not torch.equal(learner.policy.rule.head.weight, before)


def test_halves_of_a_lifetime_and_the_regret_of_its_level() -> None:
    """Episodes of 2 steps, four in each half; returns of the last one of each half count."""
    learner = groove(rule=None, unroll=100)
    over = (torch.arange(STEPS) % 2 == 1)[:, None].expand(STEPS, AGENTS)
    none = torch.zeros(STEPS, AGENTS, dtype=torch.bool)
    ended = none.clone()
    returns: list[Tensor] = []
    for number in range(2):
        given = batch(number, over)
        given["reward"] = torch.full((STEPS, AGENTS), 1.0 + number)
        learner.update(given)
        returns.append(learner.taught.clone())
    assert not returns[0].any() and returns[1].all(), "four episodes are over in the second batch"
    assert learner.shares.tolist() == [[1.0] * 3, [0.0] * 3]
    assert learner.scores[0].tolist() == [4.0] * 3, "two steps of 2"
    assert not learner.policy.logits.any()
    learner.update({**batch(2, over), "reward": torch.ones(STEPS, AGENTS)})
    last = {**batch(3, over), "reward": torch.full((STEPS, AGENTS), 0.5), "ended": ended}
    last["next_obs/first"][1, 0] = 0.0
    ended[1, 0] = True  # with the fourth episode of the second half
    metrics = learner.update(last)
    assert metrics["baseline_return"].item() == 4.0 and metrics["rule_return"].item() == 1.0
    steps = 3 * STEPS + 2
    expected = torch.zeros(STEPS, AGENTS)
    expected[1, 0] = 3.0 * steps  # its mean over the lifetime's steps is the regret
    torch.testing.assert_close(learner.estimates["advantage"], expected)
    assert learner.taught.tolist() == [False, True, True]


def run_settings(folder: Path, **more: Any) -> dict[str, Any]:
    maze = node_of("envs.maze.env.Maze", num_envs=4, side=5, blocks=6, horizon=8, observe="cell")
    trials = {"_target_": "embodied.envs.wrappers.trials.Trials", "episodes": 8}
    env = node_of("envs.wrappers.stack.Wrapped", num_envs=4, env=maze, wrappers=[trials])
    policy = node_of("policies.tabular.Tabular", agents=4, width=8)
    learner = node_of("learners.on_policy.groove.Groove", horizon=6, episodes=4, unroll=3, **more)
    return settings(folder, "on_policy", env=env, policy=policy, learner=learner, steps=600)


def test_resume_is_exact_in_the_midst_of_a_chain_of_updates(tmp_path: Path) -> None:
    resumed(run_settings(tmp_path / "run"), 264)  # 11 updates: two of the chain of three


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="agents=5"):
        groove().update({"reward": torch.zeros(2, 5), **nest(batch(0), "")})
    with pytest.raises(ConfigError, match="symbols"):
        make_policy("tabular.Tabular", Spec({"x": Leaf((2,))}, SPEC.act, 0.1))
