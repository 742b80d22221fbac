"""The worst parameters: a known minimum, the command, its files, and training at what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.commands.eval import evaluate_run
from embodied.core.build import ConfigError, parse
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.evaluation.worst_case import FILE, Config, Floats, Found, search, worst_case
from embodied.training.logger import read_metrics
from tests.builders import make_policy, node_of, run_folder
from tests.evaluation.test_evaluation import Telling
from tests.teachers.place import made

PLACE = (0.3, 0.85)


def bowl(point: Floats) -> float:
    return float(np.square(point - PLACE).sum())


def found_by(**settings: Any) -> Found:
    return search(("a", "b"), parse(Config, settings, "search"), bowl)


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
        config = Config(names=(name,), cells=2, episodes=4, generations=0)
        worst = worst_case(policy, env, config, 6, 1)
        assert len(worst.found.points) == points and worst.found.worst == [0.0]
        drawn = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))[:, 0].mean().item()
        expected = 10 * drawn if mean is None else mean
        assert worst.metrics()["worst_return"] == pytest.approx(expected, abs=1e-5)
        low, high = worst.interval
        assert low <= expected + 1e-5 and expected <= high + 1e-5
        assert worst.values[name][1] == "m"
    with pytest.raises(ConfigError, match="goal_z"):
        worst_case(policy, env, Config(names=("goal_z1",)), 4, 0)


ENV = {**node_of("envs.fr3.env.Fr3", task="reach", horizon=2), "threads": 1}
RANDOM = {"randomize": {"gain": [0.5, 1.0], "damping": [1.0, 3.0]}}
POLICY = node_of("policies.gaussian.Gaussian", hidden=[8], chunk=2)


def test_the_command_writes_what_a_teacher_reads(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", ENV | RANDOM, POLICY, (1,))
    words = ["worst_case=true", "search.names=[gain]", "search.cells=2", "search.generations=0"]
    words += ["search.episodes=2", "episodes=3", f"out={tmp_path / 'worst'}"]
    row = evaluate_run(run, words, [])
    kept = json.loads((tmp_path / "worst" / FILE).read_text())
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
    file = tmp_path / FILE
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
