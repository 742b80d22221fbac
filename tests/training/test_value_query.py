"""The learner's values of the initial observations of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.seeding import seed_everything
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.task_sampling import SEED, TaskValueEstimator, task_value_estimator
from tests.training.test_level_teaching import MEMORY
from tests.training.test_level_teaching import NODE as MAZES
from tests.training.test_teaching import NODE, PPO, run

SPDL = yaml.safe_load(Path("configs/teacher/selfpaced.yaml").read_text())
ASKING = {**NODE, **PPO, "teacher": {**SPDL, "value": "critic", "every": 20, "signal": "return"}}


def parts_of(folder: Path, node: dict[str, Any]) -> RunComponents:
    seed_everything(0)
    return RunComponents(read_config({**node, "out": str(folder)}))


@pytest.mark.parametrize("policy", [MAZES["policy"], MEMORY], ids=["plain", "memory"])
def test_values_are_the_critics_of_first_observations(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    """More tasks than rows; with memory, of one that has seen nothing yet."""
    parts = parts_of(tmp_path, {**MAZES, "policy": policy})
    student = task_value_estimator(MAZES["env"], parts.learner, parts.device)
    assert isinstance(student, TaskValueEstimator)
    env: Any = build(MAZES["env"], VecEnv)
    tasks = env.levels.random(6, np.random.default_rng(0))
    found = student.values(tasks)
    assert found.shape == (6,) and np.array_equal(found, student.values(tasks))
    rows = torch.from_numpy(tasks[[4, 5, 4, 5]]).float()
    obs = env.reset(SEED, rows)
    value: Any = parts.learner.value
    if policy is MEMORY:
        batch = {key: leaf[None] for key, leaf in obs.items()}
        wanted = value(batch, torch.zeros(4, 8), torch.ones(1, 4, dtype=torch.bool))[0][0]
    else:
        wanted = value(obs)
    assert np.allclose(found[4:], wanted[:2].detach().numpy(), atol=1e-6)


def test_a_teacher_asks_in_a_run_and_a_resume_is_exact(tmp_path: Path) -> None:
    whole, state = run(tmp_path / "whole", ASKING)
    assert state["teacher"]["updates"] >= 2
    run(tmp_path / "parts", {**ASKING, "steps": 280})
    again, other = run(tmp_path / "parts", ASKING, resume=str(tmp_path / "parts"))
    assert again == whole and str(other) == str(state)


def test_who_does_not_know_is_not_asked(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, NODE | {"teacher": None})
    assert task_value_estimator(NODE["env"], parts.learner, parts.device) is None
