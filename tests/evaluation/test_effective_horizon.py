"""Effective horizon: trees whose answer is known, and environments that cannot be measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.evaluation.effective_horizon import Attempt, Config, Gorp
from tests.builders import exit_of
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter, Tree, TreeConfig

TRAP = {"0": 0.5, "13": 1.0}  # of four actions: 1/4 in the mean after 1, but 1 for who knows


def measured(tree: TreeConfig, **settings: Any) -> tuple[Gorp, list[Attempt]]:
    gorp = Gorp(Config(num_envs=64, **settings), Tree(replace(tree, num_envs=64)))
    return gorp, [*gorp.attempts()]


def test_a_reward_at_once_needs_one_look() -> None:
    """k = 1, m = 1: in every step the action that pays."""
    rewards = {"1": 10.0, "11": 10.0, "111": 10.0}
    gorp, tried = measured(TreeConfig(rewards, length=3, goal="111"))
    assert tried == [Attempt(1, 1, 1.0, 5)]
    assert gorp.length == 3
    # Of each step t: A runs of T - t steps, and the step itself.
    assert gorp.used == 5 * (2 * (3 + 2 + 1) + 3)


def test_a_trap_needs_a_look_two_steps_ahead() -> None:
    """However many completions, one step ahead the mean is 1/4 < 1/2; all 4^2 sequences find it."""
    gorp, tried = measured(TreeConfig(TRAP, actions=4, goal="13"))
    assert [(each.depth, each.completions) for each in tried] == [(1, 1), (1, 2), (1, 4), (2, 1)]
    assert [each.horizon for each in tried] == pytest.approx([1.0, 1.5, 2.0, 2.0])
    assert tried[-1].solved == 5
    assert not any(gorp.solves(gorp.starts[0], 1, 256) for _ in range(3))


def test_a_lock_needs_as_many_looks_as_digits_and_a_potential_none_fewer() -> None:
    """Rewards of right digits help; those of a potential that is 0 at the end change nothing."""
    digits = "1" * 6
    lock = {digits: 1.0}
    dense = lock | {digits[:n]: 1.0 for n in range(1, 6)}
    lost = {f"{digits[:n]}0": -float(n) for n in range(6)}
    potential = dense | lost | {digits: 1.0 - 5.0}
    sparse, shaped, quick = (
        measured(TreeConfig(rewards, length=6, goal=digits))[1]
        for rewards in (lock, potential, dense)
    )
    assert shaped == sparse
    assert sparse[-1].horizon >= 4 and quick[-1].horizon <= 2


def test_the_steps_are_a_bound() -> None:
    digits = "1" * 8
    gorp, tried = measured(TreeConfig({digits: 1.0}, length=8, goal=digits), steps=500)
    assert tried and tried[-1].solved < 3
    assert gorp.used < 1000


def test_a_target_is_a_return() -> None:
    found = [
        measured(TreeConfig(TRAP, actions=4), target=target)[1][-1].depth for target in (0.5, 1.0)
    ]
    assert found == [1, 2]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="Tree is random"):
        measured(TreeConfig({}, noise=1.0))
    with pytest.raises(ConfigError, match="state_roles"):
        Gorp(Config(num_envs=2), Counter(CounterConfig()))
    with pytest.raises(ConfigError, match="4,782,969 combinations"):
        wide = Counter(CounterConfig())
        wide.spec = wide.spec.with_act(Leaf((14,), low=-1.0, high=1.0))
        Gorp(Config(num_envs=2), wide)


def test_the_command_says_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("env", "horizon", "CartPole-v1", "target=20", "num_envs=8", "tries=2") == 0
    shown = capsys.readouterr().out
    assert "k + log_A m" in shown and "effective horizon 1.00: 2 actions" in shown
    for words, says in (
        (["maze_trials"], "cannot begin in the middle"),
        (["cartpole", "num_envs=2"], "target=NUMBER"),
        (["cartpole", "dept=2"], "depth"),
    ):
        assert exit_of("env", "horizon", *words) == 2
        line = capsys.readouterr().err
        assert says in line and line.count("\n") == 1
