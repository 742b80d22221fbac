"""Evaluations: metrics, intervals and means by hand; every task of a grid once."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.spec import Leaf, Spec
from embodied.core.wrapper import Wrapper
from embodied.envs.fr3.env import Config, Fr3
from embodied.evaluation.evaluate import Evaluation, evaluate
from embodied.evaluation.statistics import (
    bootstrap_interval,
    iqm,
    performance_profile,
    rate,
    wilson,
)
from embodied.evaluation.task_grid import FILE, TaskGridEval, grid
from embodied.training.logger import Log
from embodied.training.train import train
from tests.builders import make_policy
from tests.training.test_teaching import NODE


def test_the_worst_tenth_is_the_mean_of_the_lowest_returns() -> None:
    """Of 20 returns the two lowest; of 21 three; of one itself."""
    for returns, worst in (([*range(20)], 0.5), ([*range(21)], 1.0), ([4], 4.0)):
        shuffled = torch.tensor(returns).float()[torch.randperm(len(returns))]
        metrics = Evaluation(None, shuffled, torch.ones(len(returns))).metrics()
        assert metrics["return_cvar10"] == pytest.approx(worst)
        assert metrics["return"] == pytest.approx(sum(returns) / len(returns))


Z = 1.959963984540054


def test_wilson_by_hand() -> None:
    """5 of 10: centre 1/2, half width z sqrt(1/40 + z^2/400) / (1 + z^2/10) = 0.263405."""
    low, high = wilson(5, 10)
    square = Z**2
    half = Z * math.sqrt(0.25 / 10 + square / 400) / (1 + square / 10)
    assert low == pytest.approx(0.5 - half) and high == pytest.approx(0.5 + half)
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)


def test_wilson_at_the_ends() -> None:
    """0 of 10: the upper end is z^2 / (n + z^2) = 3.8415 / 13.8415; it mirrors 10 of 10."""
    low, high = wilson(0, 10)
    assert low == 0.0 and high == pytest.approx(3.841459 / 13.841459, abs=1e-6)
    assert wilson(10, 10) == (pytest.approx(1 - high), 1.0)
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="11 successes of 10 trials"):
        wilson(11, 10)


def test_rate_is_what_people_read() -> None:
    assert rate(5, 10) == "50% [24%, 76%]"
    assert rate(199, 200) == "99.5% [97%, 99.9%]", "100% is said of all only"
    assert rate(1, 200).startswith("0.5% [") and rate(200, 200).startswith("100% [")


def test_iqm_by_hand() -> None:
    """Of eight numbers two go at each end; of five, one; of three, none; the order is no matter."""
    assert iqm([100, 1, 2, 3, 4, 5, 6, -50]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert iqm([9, 1, 2, 3, 1000]) == pytest.approx((2 + 3 + 9) / 3)
    assert iqm([0, 0, 3]) == pytest.approx(1.0)
    assert iqm(np.array([[1.0, 2.0], [3.0, 40.0]])) == pytest.approx(2.5)


def test_bootstrap_of_one_and_of_two_runs_by_hand() -> None:
    """Means of two draws from {0, 1} are 0, 1/2, 1 with 1/4, 1/2, 1/4: the 95% ends are 0 and 1,
    the 40% ends (30th and 70th percentile) both 1/2."""
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], confidence=0.4) == (0.5, 0.5)
    # Each task keeps its own runs: two tasks without spread have an interval without width.
    scores = np.array([[0.0, 10.0]] * 5)
    assert bootstrap_interval(scores, statistic=lambda rows: rows.mean(1)) == (5.0, 5.0)
    assert bootstrap_interval([0.7]) == (0.7, 0.7)
    with pytest.raises(ValueError, match="at least one score"):
        bootstrap_interval([])


def test_a_profile_is_the_share_of_runs_above_each_score() -> None:
    found = performance_profile([0.2, 0.5, 0.5, 1.0], [0.0, 0.2, 0.5, 1.0])
    assert found.tolist() == [1, 0.75, 0.25, 0]
    with pytest.raises(ValueError, match="at least one"):
        performance_profile([], [0.0])


SPEC = Spec({}, Leaf((1,)), 0.1, Leaf((2,), low=0.0, high=1.0, names=("a", "b")))


def test_the_grid_has_the_middles_of_cells() -> None:
    expected = [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]
    assert grid(SPEC, 2).tolist() == expected
    with pytest.raises(ConfigError, match="at most"):
        grid(SPEC, 101)
    with pytest.raises(ConfigError, match="none"):
        grid(replace(SPEC, task=None), 2)


class Telling(Wrapper):
    """Pays the first element of its row's task, times ten, in the last step of an episode."""

    def step(self, action: torch.Tensor) -> Step:
        task = torch.from_numpy(self.env.task.copy())[:, 0].float()  # type: ignore[attr-defined]
        step = self.env.step(action)
        return replace(step, reward=10 * task * step.ended)


def test_every_task_is_played_once_and_listed_in_order() -> None:
    """Five tasks in two rows: the sixth episode is not counted."""
    env = Telling(Fr3(Config(task="reach", num_envs=2, threads=1, horizon=3)))
    tasks = torch.tensor([[0.1, 0.5, 0.5], [0.3] * 3, [0.5] * 3, [0.7] * 3, [0.9] * 3])
    policy = make_policy("gaussian.Gaussian", env.spec, seed=None, hidden=[8])
    result = evaluate(policy, TaskGridEval(env, tasks), 5, 0)
    assert result.returns.tolist() == pytest.approx([1, 3, 5, 7, 9])


def test_a_run_writes_down_every_tasks_outcome(tmp_path: Path) -> None:
    settings = {"eval": {"num_envs": 4, "grid": 2}, "steps": 64, "eval_every": 32, "teacher": None}
    log = Log(tmp_path)
    train({**NODE, **settings, "out": str(tmp_path)}, log)
    assert log.last["eval/episodes"] == 8
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [row["step"] for row in rows] == [32] * 8 + [64] * 8
    assert [row["task"] for row in rows[:8]] == grid(
        Fr3(Config(task="reach", num_envs=1)).spec, 2
    ).tolist()
    assert {row["success"] for row in rows} <= {True, False}
    train({**NODE, **settings, "steps": 32, "out": str(tmp_path)}, Log(tmp_path, silent=True))
    again = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line) for line in again] == rows[:8]  # what came later is of another run
