"""Evaluation on a grid of tasks: every task once, in every run, with its outcome written down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.env import Step
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.wrapper import Wrapper
from embodied.envs.fr3.env import Config, Fr3
from embodied.evaluation.evaluate import evaluate
from embodied.evaluation.task_grid import FILE, TaskGridEval, grid
from embodied.training.logger import Log
from embodied.training.train import train
from tests.training.test_teaching import NODE

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
    policy = build(
        {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}, Policy, spec=env.spec
    )
    result = evaluate(policy, TaskGridEval(env, tasks), 5, 0)
    assert result.returns.tolist() == pytest.approx([1, 3, 5, 7, 9])


def test_a_run_writes_down_every_tasks_outcome(tmp_path: Path) -> None:
    settings = {"eval": {"num_envs": 4, "grid": 2}, "steps": 64, "eval_every": 32, "teacher": None}
    log = Log(tmp_path)
    train({**NODE, **settings, "out": str(tmp_path)}, log)
    assert log.last["eval/episodes"] == 8
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [row["step"] for row in rows] == [32] * 8 + [64] * 8
    assert [row["task"] for row in rows[:8]] == grid(_spec(), 2).tolist()
    assert {row["success"] for row in rows} <= {True, False}
    train({**NODE, **settings, "steps": 32, "out": str(tmp_path)}, Log(tmp_path, silent=True))
    again = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line) for line in again] == rows[:8]  # what came later is of another run


def _spec() -> Spec:
    return Fr3(Config(task="reach", num_envs=1)).spec
