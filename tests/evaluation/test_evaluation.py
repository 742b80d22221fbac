"""Evaluations, intervals and grids of tasks by hand; the worst parameters and their command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.commands.eval import evaluate_run
from embodied.core.build import ConfigError, parse
from embodied.core.env import Step
from embodied.core.spec import Leaf, Spec
from embodied.core.wrapper import Wrapper
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.evaluation.evaluate import Evaluation, evaluate
from embodied.evaluation.statistics import (
    bootstrap_interval,
    iqm,
    performance_profile,
    rate,
    wilson,
)
from embodied.evaluation.task_grid import (
    FILE,
    Floats,
    Found,
    TaskGridEval,
    grid,
    search,
    worst_case,
)
from embodied.evaluation.task_grid import WORST as WORST_FILE
from embodied.evaluation.task_grid import Config as SearchConfig
from embodied.training.logger import Log, read_metrics
from embodied.training.train import train
from tests.builders import make_policy, node_of, run_folder
from tests.teachers.place import made
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
    env = Telling(Fr3(Fr3Config(task="reach", num_envs=2, threads=1, horizon=3)))
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
        Fr3(Fr3Config(task="reach", num_envs=1)).spec, 2
    ).tolist()
    assert {row["success"] for row in rows} <= {True, False}
    train({**NODE, **settings, "steps": 32, "out": str(tmp_path)}, Log(tmp_path, silent=True))
    again = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line) for line in again] == rows[:8]  # what came later is of another run


PLACE = (0.3, 0.85)


def bowl(point: Floats) -> float:
    return float(np.square(point - PLACE).sum())


def found_by(**settings: Any) -> Found:
    return search(("a", "b"), parse(SearchConfig, settings, "search"), bowl)


def test_the_grid_has_both_ends_and_the_nearest_point_is_found() -> None:
    """Of 0, 1/2, 1 the nearest to 0.3 is 1/2 (0.2 against 0.3), to 0.85 it is 1."""
    found = found_by(cells=3, generations=0)
    assert found.points == [[a, b] for a in (0, 0.5, 1) for b in (0, 0.5, 1)]
    assert found.worst == [0.5, 1.0] and min(found.scores) == pytest.approx(0.04 + 0.0225)


def test_the_search_goes_on_where_the_grid_ends() -> None:
    pytest.importorskip("scipy")
    found = found_by(cells=3, generations=20)
    assert found.worst == pytest.approx(PLACE, abs=0.05)
    assert found.points == found_by(cells=3, generations=20).points
    assert len(found.points) == len({*map(tuple, found.points)}) <= 9 + 20 * 10 + 1
    assert np.min(found.points) >= 0 and np.max(found.points) <= 1


def test_a_grid_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 2,000.*search.names=\[...\] of a, b"):
        found_by(cells=100)


def test_only_the_named_parameters_are_searched() -> None:
    """The return is ten times goal_x: worst at 0. With goal_y alone it is the mean of ten times the
    drawn goal_x, the same for every point, so that the first one is taken."""
    env = Telling(Fr3(Fr3Config(task="reach", num_envs=2, threads=1, horizon=2)))
    policy = make_policy("gaussian.Gaussian", env.spec, hidden=[8])
    for name, mean, points in (("goal_x", 0.0, 2), ("goal_y", None, 2)):
        config = SearchConfig(names=(name,), cells=2, episodes=4, generations=0)
        worst = worst_case(policy, env, config, 6, 1)
        assert len(worst.found.points) == points and worst.found.worst == [0.0]
        drawn = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))[:, 0].mean().item()
        expected = 10 * drawn if mean is None else mean
        assert worst.metrics()["worst_return"] == pytest.approx(expected, abs=1e-5)
        low, high = worst.interval
        assert low <= expected + 1e-5 and expected <= high + 1e-5
        assert worst.values[name][1] == "m"
    with pytest.raises(ConfigError, match="goal_z"):
        worst_case(policy, env, SearchConfig(names=("goal_z1",)), 4, 0)


ENV = {**node_of("envs.fr3.env.Fr3", task="reach", horizon=2), "threads": 1}
RANDOM = {"randomize": {"gain": [0.5, 1.0], "damping": [1.0, 3.0]}}
POLICY = node_of("policies.gaussian.Gaussian", hidden=[8], chunk=2)


def test_the_command_writes_what_a_teacher_reads(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", ENV | RANDOM, POLICY, (1,))
    words = ["worst_case=true", "search.names=[gain]", "search.cells=2", "search.generations=0"]
    words += ["search.episodes=2", "episodes=3", f"out={tmp_path / 'worst'}"]
    row = evaluate_run(run, words, [])
    kept = json.loads((tmp_path / "worst" / WORST_FILE).read_text())
    assert kept["points"] == [[0.0], [1.0]] and row["episodes"] == kept["episodes"] == 3
    at = kept["worst"]["gain"]
    assert row["worst"] == {"gain": [pytest.approx(0.5 + at / 2), ""]}
    last = read_metrics(tmp_path / "worst")[-1]
    assert last["eval/worst_return"] == pytest.approx(row["return"])
    evaluate_run(run, [*words[:-1], "search.cells=2"], [])
    assert "Worst parameters" in (run / "report.html").read_text()
    with pytest.raises(ConfigError, match="worst_case"):
        evaluate_run(run, ["worst_case=maybe"], [])


def test_a_teacher_fixes_the_worst_parameters(tmp_path: Path) -> None:
    file = tmp_path / WORST_FILE
    file.write_text(json.dumps({"worst": {"y": 0.25}}))
    teacher = made("tasks.uniform.Uniform", fixed=str(file))
    tasks, _ = teacher.sample(50)
    assert (tasks[:, 1] == 0.25).all() and tasks[:, 0].std() > 0.1
    within = made("tasks.uniform.Uniform", fixed=str(file), box={"y": [0.2, 0.4]})
    assert within.sample(3)[0][:, 1].tolist() == pytest.approx([0.25] * 3)
    for settings, says in (
        ({"fixed": str(file), "box": {"y": [0.5, 1.0]}}, "outside its box"),
        ({"fixed": str(tmp_path / "none.json")}, "worst_case=true"),
    ):
        with pytest.raises(ConfigError, match=says):
            made("tasks.uniform.Uniform", **settings)
