"""DBS and ASAF: multipliers, frequencies and windows by hand, and optima that are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.toy import patrol
from embodied.learners.on_policy.asaf import windows
from embodied.training.collector import Collector
from tests.builders import LINE, make_policy, still, transitions
from tests.learners.parts import constant, learner_of

NEVER: Any = None  # a step: not read


def dbs(**settings: Any) -> Any:
    return learner_of("off_policy.dbs.Dbs", "gaussian.Gaussian", LINE, **settings)


def events(n: int, **flags: list[bool]) -> Tensors:
    """`n` transitions that end, with flags."""
    batch = still(torch.zeros(n, 1), torch.zeros(n, 1), torch.zeros(n))
    return batch | {name: torch.tensor(values) for name, values in flags.items()}


def test_the_multipliers_by_hand() -> None:
    learner = dbs(at_most={"fast": 0.1}, at_least={"success": 0.5}, initial=math.log(2))
    torch.testing.assert_close(learner.multipliers(), torch.tensor([0.2, 0.4, 0.4]))
    learner.config = dbs(
        at_most={"fast": 0.1}, at_least={"success": 0.5}, bootstrap="success"
    ).config
    torch.testing.assert_close(learner.multipliers(), torch.tensor([0.4, 0.4, 0.4]))


def test_the_step_of_the_multipliers_by_hand() -> None:
    """Of lambda = (1/3, 1/3, 1/3) and excesses 0.3 and -0.1: w_0 has the slope
    -(1/3)(1/3)(0.3 - 0.1), and those of the constraints are (1/3)(e_k - (1/3)(0.3 - 0.1))."""
    learner = dbs(at_most={"fast": 0.1}, at_least={"success": 0.5})
    learner.recent = torch.tensor([0.4, 0.6])
    excess = learner.sign * (learner.recent - learner.share)
    torch.testing.assert_close(excess, torch.tensor([0.3, -0.1]))
    (learner.logits.softmax(0)[1:] @ excess).backward()
    mean = 0.2 / 3
    expected = torch.tensor([-mean / 3, (0.3 - mean) / 3, (-0.1 - mean) / 3])
    torch.testing.assert_close(learner.logits.grad, expected)


def test_a_constraint_that_is_missed_gains_weight() -> None:
    learner = dbs(at_most={"fast": 0.1}, at_least={"success": 0.5}, multiplier_lr=0.01)
    learner.observe_step(events(2, fast=[True, False], success=[True, False]), NEVER, NEVER)
    metrics = learner.update(events(2, fast=[True, False], success=[True, True]))
    assert metrics["excess"] == pytest.approx(0.4)
    assert metrics["multiplier_fast"] > 1 / 3 > metrics["multiplier_reward"]
    assert dbs(at_most={"fast": 0.1}, multiplier_lr=0.0).update(events(2, fast=[True, False]))[
        "multiplier_fast"
    ] == pytest.approx(0.5)


def test_the_costs_and_the_objective_by_hand() -> None:
    """Costs c + gamma_c C' (no C' after the end); values lambda_0 Q - s_k lambda_k C."""
    learner = dbs(at_most={"fast": 0.1}, at_least={"success": 0.5}, cost_gamma=0.5)
    constant(learner.costs.ensemble, [0.0, 0.0])
    constant(learner.later_costs.ensemble, [2.0, 4.0])
    batch = transitions(2, LINE) | {
        "discount": torch.tensor([0.99, 0.0]),
        "fast": torch.tensor([True, False]),
        "success": torch.tensor([False, False]),
    }
    # fast: 1 + 0.5 * 2 and 0; success: 0 + 0.5 * 4 and 0; the mean of the squares, summed.
    assert float(learner._cost_loss(batch).detach()) == pytest.approx((4 + 0) / 2 + (4 + 0) / 2)
    constant(learner.costs.ensemble, [2.0, 4.0])
    constant(learner.critic.ensemble, [6.0, 9.0])
    loss, log_prob = learner._actor_loss(batch)
    wanted = 6 / 3 - (2 - 4) / 3
    assert float(loss.detach()) == pytest.approx(
        float((learner.alpha * log_prob).mean()) - wanted, abs=1e-5
    )


def test_frequencies_are_those_of_the_newest_steps() -> None:
    learner = dbs(at_most={"fast": 0.25}, window=4)
    assert float(learner.recent) == 0.25  # nothing is known, so nothing is missed
    learner.observe_step(events(2, fast=[True, False]), NEVER, NEVER)
    assert float(learner.recent) == 0.5
    learner.observe_step(events(2, fast=[True, True]), NEVER, NEVER)
    assert float(learner.recent) == 0.75
    learner.observe_step(events(2, fast=[False, False]), NEVER, NEVER)
    assert float(learner.recent) == 0.375  # half of the window


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"at_most": {}}, "needs flags"),
        ({"at_most": {"fast": 0.1}, "at_least": {"fast": 0.05}}, "each in one of"),
        ({"bootstrap": "violated"}, "one of at_least"),
        ({"n_step": 2}, "n_step=1"),
        ({"at_most": {"fast": 1.5}}, "at most 1"),
    ],
)
def test_wrong_constraints_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        dbs(**settings)


def test_an_asked_frequency_is_kept() -> None:
    """The reward is the action, and positive actions are to happen in 30% of the steps."""
    torch.manual_seed(0)
    rates = {"actor_lr": 3e-3, "critic_lr": 3e-3, "multiplier_lr": 3e-3}
    soft = {"initial_temperature": 0.2, "temperature_lr": 0.0, "cost_gamma": 0.0}
    learner = dbs(at_most={"high": 0.3}, batch_size=64, window=1000, hidden=[32], **rates, **soft)
    shares: list[float] = []
    for _ in range(1000):
        action, _ = learner.drawn({"state": torch.zeros(64, 1)})
        action = action.detach()
        batch = still(torch.zeros(64, 1), action, action[:, 0]) | {"high": action[:, 0] > 0}
        learner.observe_step(batch, NEVER, NEVER)
        shares.append(float((action > 0).float().mean()))
        learner.update(batch)
    assert sum(shares[-500:]) / 500 == pytest.approx(0.3, abs=0.03)


def test_flags_of_steps_are_stored_where_they_are_asked_for() -> None:
    env = patrol.Patrol(patrol.Config(num_envs=3))
    acting = make_policy("gaussian.Gaussian", env.spec, hidden=[8])
    rows, _ = Collector(env, acting, 0.9, flags=("fast", "success")).step()
    assert {"fast", "success", "violated"} <= rows.keys()
    assert "fast" not in Collector(env, acting, 0.9).step()[0]


def stepped(place: list[float], velocity: list[float], goal: list[float]) -> tuple[Any, Step]:
    """A patrol of one point with that state, after a step without a push."""
    env = patrol.Patrol(patrol.Config(num_envs=1))
    env.reset(0)
    env.place, env.velocity, env.goal = (torch.tensor([x]) for x in (place, velocity, goal))
    return env, env.step(torch.zeros(1, 2))


def test_a_step_of_the_patrol_by_hand() -> None:
    """From (-0.5, 0) at speed 1: 0.9 after drag, 0.09 further, above the limit of 0.7."""
    env, step = stepped([-0.5, 0.0], [1.0, 0.0], [0.9, 0.0])
    torch.testing.assert_close(env.place, torch.tensor([[-0.41, 0.0]]))
    assert float(step.reward) == pytest.approx(0.09)
    assert step.log["fast"].item() and not step.log["violated"].item()
    assert stepped([-0.4, 0.0], [1.0, 0.0], [0.9, 0.0])[1].log["violated"].item()
    env, step = stepped([0.8, 0.8], [0.0, 0.0], [0.85, 0.8])
    assert step.log["success"].item() and float(step.reward) == pytest.approx(1.0)
    assert float(env.goal.norm(dim=1)) > 0.35 + 0.1  # the next goal is beside the hazard
    env, step = stepped([0.99, 0.0], [1.0, 0.0], [0.0, 0.9])
    assert env.place[0, 0] == 1.0 and env.velocity[0, 0] == 0.0  # the edge stops it


ARMS = Spec({"state": Leaf((1,))}, Leaf((), "int64", 0, 2), dt=0.1)


def asaf(acting: str = "categorical.Categorical", **settings: Any) -> Any:
    return learner_of("on_policy.asaf.Asaf", acting, ARMS, normalize=False, **settings)


def decisions(action: torch.Tensor, envs: int = 1) -> Tensors:
    """Decisions [T, B] in one state, whose episodes end with each."""
    steps = len(action) // envs
    yes = torch.ones(steps, envs, dtype=torch.bool)
    state, grid = torch.zeros(steps, envs, 1), action.view(steps, envs)
    return {"obs/state": state, "action": grid, "ended": yes, "valid": yes}


def test_windows_by_hand() -> None:
    """Two columns of three decisions: an episode of two and one of one; one, and padding."""
    run = torch.tensor([[0, 0], [0, 1], [1, -1]])
    flat = {"obs/state": torch.zeros(6, 1), "action": torch.arange(6), "reward": torch.zeros(6)}
    found = windows(flat, run, 3)
    assert found.decisions.keys() == {"obs/state", "action"}
    assert found.index.tolist() == [[0, 2, 4], [1, 3, 5], [2, 4, 5], [3, 5, 5], [4, 5, 5]]
    one, two = [True, False, False], [True, True, False]
    assert found.mask.tolist() == [two, one, one, one, one]


def test_the_discriminator_by_hand() -> None:
    """D = 1/2 where nothing was learned; -log D = log 4 for a ratio of 1/3, and 1 - D for 3."""
    learner, zero, third = asaf(), torch.zeros(2), torch.full((2,), math.log(3))
    assert float(learner._loss(zero, zero)) == pytest.approx(2 * math.log(2))
    assert float(learner._loss(third, -third)) == pytest.approx(2 * math.log(4))


def test_the_ratio_of_a_window_is_that_of_its_steps() -> None:
    learner = asaf(window=2)
    episode = torch.tensor([0, 0, 1])
    learner.set_demonstrations(
        {"obs/state": torch.zeros(3, 1), "action": torch.tensor([0, 1, 2]), "episode": episode}
    )
    old = learner._log_probs(learner.shown.decisions) - torch.tensor([0.1, 0.2, 0.4])
    found = learner.log_ratio(learner.shown, old, torch.arange(3))
    torch.testing.assert_close(found.detach(), torch.tensor([0.3, 0.2, 0.4]))


@pytest.mark.parametrize("window", [1, 2])
def test_its_optimum_is_the_demonstrator(window: int) -> None:
    """Who chooses in 60, 30 and 10% of the steps."""
    torch.manual_seed(0)
    learner = asaf(lr=0.01, window=window, batch_size=100)
    shown = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 1000, replacement=True)
    learner.set_demonstrations(
        {"obs/state": torch.zeros(1000, 1), "action": shown, "episode": torch.arange(1000) // 2}
    )
    state = {"state": torch.zeros(1000, 1)}
    for _ in range(6):
        with torch.no_grad():
            plan, _ = learner.policy.act(state, {}, learner.policy.sample_noise(1000, True))
        metrics = learner.update(decisions(plan[:, 0], envs=10))
    assert metrics["shown"] == pytest.approx(0.5, abs=0.05)
    chance = [
        float(learner._log_probs({"obs/state": torch.zeros(1, 1), "action": arm}).exp())
        for arm in torch.arange(3)[:, None]
    ]
    share = shown.bincount() / 1000
    assert chance == pytest.approx(share.tolist(), abs=0.05)


def test_it_needs_demonstrations_of_single_actions() -> None:
    with pytest.raises(ConfigError, match="demos=DIR"):
        asaf().update(decisions(torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="single actions"):
        learner_of("on_policy.asaf.Asaf", "gaussian.Gaussian", LINE)
