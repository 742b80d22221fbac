"""A teacher in a run: it chooses the tasks, and a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.teachers.teacher import FILE
from embodied.training.logger import Log
from embodied.training.train import train

NODE: dict[str, Any] = {
    "name": "taught",
    "env": {"_target_": "embodied.envs.fr3.env.Fr3", "task": "reach", "num_envs": 4, "horizon": 8},
    "policy": {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]},
    "learner": {"_target_": "embodied.learners.off_policy.sac.Sac", "hidden": [8], "batch_size": 8},
    "teacher": {
        "_target_": "embodied.teachers.tasks.learning_progress.AlpGmm",
        "box": {"goal_x": [0.1, 0.3]},
        "signal": "return",
        "every": 20,
    },
    "steps": 480,
    "data": {"warmup_steps": 32, "utd_ratio": 0.1},
    "eval": {"episodes": 4, "num_envs": 4},
    "video": False,
}
PPO = {
    "policy": {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian", "hidden": [8]},
    "learner": {
        "_target_": "embodied.learners.on_policy.ppo.Ppo",
        "horizon": 12,
        "batch_size": 16,
        "epochs": 1,
    },
    "data": "on_policy",
}


def run(folder: Path, node: dict[str, Any], **changes: Any) -> tuple[list[dict[str, Any]], Any]:
    node = {**node, "out": str(folder), **changes}
    train(node, Log(folder, silent=True))
    lines = (folder / FILE).read_text().splitlines()
    return [json.loads(line) for line in lines], checkpoint.load_state(folder, "loop")["loop"][
        "parts"
    ]


@pytest.mark.parametrize("more", [{}, PPO], ids=["replay", "rollout"])
def test_tasks_are_the_teachers_and_a_resume_is_exact(tmp_path: Path, more: dict[str, Any]) -> None:
    node = {**NODE, **more}
    whole, state = run(tmp_path / "whole", node)
    assert len(whole) >= 40 and len({row["episode"] for row in whole}) == len(whole)
    assert all(0.1 <= row["task"][0] <= 0.3 for row in whole)
    assert {row["length"] for row in whole} <= set(range(1, 9))
    run(tmp_path / "parts", {**node, "steps": 240})
    with (tmp_path / "parts" / FILE).open("a") as late:
        late.write('{"half a li')  # what came after the checkpoint is cut off
    again, other = run(tmp_path / "parts", node, resume=str(tmp_path / "parts"))
    assert again == whole
    assert str(other) == str(state)


def test_an_offline_learner_has_no_use_for_a_teacher(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="teacher has no effect in offline"):
        run(tmp_path / "run", NODE, data="offline")


def test_the_report_shows_where_the_teacher_sampled(tmp_path: Path) -> None:
    from embodied.reports.run_report import write

    run(tmp_path / "run", NODE)
    page = write(tmp_path / "run").read_text()
    assert "that the teacher sampled" in page and (tmp_path / "run" / "tasks.png").stat().st_size
