"""Teachers of levels in a run: they hear of every step, a resume is exact, and evaluation is on the
held-out mazes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.cli import main
from embodied.core.build import ConfigError
from embodied.core.config_fields import complete
from embodied.core.device import seed_everything
from embodied.envs.maze.render import GOAL
from embodied.evaluation.task_grid import FILE, TaskGridEval
from embodied.teachers.task_wrapper import TaskWrapper
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.logger import Log
from embodied.training.trainer import Every, Trainer
from tests.training.test_teaching import run

MEMORY = {
    "_target_": "embodied.policies.recurrent.Recurrent",
    "width": 8,
    "inner": {"_target_": "embodied.policies.categorical.Categorical", "hidden": [8]},
}
NODE: dict[str, Any] = {
    "name": "mazes",
    "env": {
        "_target_": "embodied.envs.maze.env.Maze",
        "side": 5,
        "blocks": 8,
        "num_envs": 4,
        "horizon": 9,
    },
    "policy": {"_target_": "embodied.policies.categorical.Categorical", "hidden": [8]},
    "learner": {
        "_target_": "embodied.learners.on_policy.ppo.Ppo",
        "horizon": 12,
        "batch_size": 16,
        "epochs": 1,
        "normalize": False,
    },
    "steps": 960,
    "eval": {"episodes": 6, "num_envs": 4},
    "video": False,
}
SMALL: dict[str, Any] = {
    "size": 12,
    "every": 6,
    "autoencoder": {"pool": 64, "steps": 3, "latent": 4},
}


def node(name: str, **changes: Any) -> dict[str, Any]:
    teacher = complete(yaml.safe_load(Path(f"configs/teacher/{name}.yaml").read_text()))
    small = {key: value for key, value in SMALL.items() if key in teacher}
    return {**NODE, "teacher": teacher | small, **changes}


@pytest.mark.parametrize("policy", [NODE["policy"], MEMORY], ids=["plain", "memory"])
@pytest.mark.parametrize("name", ["domain_randomization", "plr", "accel"])
def test_a_resume_is_exact(tmp_path: Path, name: str, policy: dict[str, Any]) -> None:
    """In the middle of a batch, with episodes whose outcome is known and whose steps are not."""
    taught = node(name, policy=policy)
    whole, state = run(tmp_path / "whole", taught)
    assert len(whole) >= 80 and {len(row["task"]) for row in whole} == {28}
    run(tmp_path / "parts", {**taught, "steps": 560})
    again, other = run(tmp_path / "parts", taught, resume=str(tmp_path / "parts"))
    assert again == whole
    assert str(other) == str(state)


@pytest.mark.parametrize("name", ["plr", "accel"])
def test_every_step_is_told_of_once(tmp_path: Path, name: str) -> None:
    """After an update, running episodes have as many steps as the world has counted."""
    seed_everything(0)
    parts = RunComponents(read_config({**node(name), "out": str(tmp_path)}))
    log = Log(tmp_path, silent=True)
    with Trainer(log, 960, Every(0, 0, 0), lambda step: None, lambda step: None) as keeper:
        parts.loop.run(keeper)
    loop: Any = parts.loop
    estimates, world = loop.estimates, loop.collector.env
    assert estimates is not None and isinstance(world, TaskWrapper) and not estimates.ended
    numbers, steps = (world.memory[key].tolist() for key in ("ticket", "length"))
    lengths = dict(zip(numbers, steps, strict=True))
    told = {number: row[0] for number, row in estimates.sums.items()}
    assert told and told == {number: length for number, length in lengths.items() if length}
    assert world.teacher.dropped == 0
    teacher: Any = world.teacher
    assert set(teacher.pending) == set(lengths) and len(teacher.library) == 12


def test_a_student_that_expects_nothing_is_refused(tmp_path: Path) -> None:
    scaled = {**NODE["learner"], "scale_rewards": True}
    with pytest.raises(ConfigError, match="advantages and values"):
        run(tmp_path / "a", node("plr"), learner=scaled)


def test_a_world_without_levels_is_refused(tmp_path: Path) -> None:
    from tests.training.test_teaching import NODE as FR3
    from tests.training.test_teaching import PPO

    with pytest.raises(ConfigError, match="environment with levels"):
        run(tmp_path / "a", {**FR3, **PPO}, teacher=node("plr")["teacher"])


def test_evaluation_is_on_the_held_out_mazes(tmp_path: Path) -> None:
    run(tmp_path / "run", node("domain_randomization"))
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    parts = RunComponents(read_config({**node("domain_randomization"), "out": str(tmp_path)}))
    assert isinstance(parts.evaluation.env, TaskGridEval)
    held: Any = parts.evaluation.env.held_out
    tasks = torch.tensor([line["task"] for line in lines])
    torch.testing.assert_close(tasks, held[:6], atol=1e-4, rtol=0)


def test_the_report_shows_levels(tmp_path: Path) -> None:
    """Nine of each quarter, drawn as the world draws them, not points over two of 28 numbers."""
    from embodied.datasets.lerobot.video import decode_image
    from embodied.reports import task_sampling
    from embodied.reports.run_report import write
    from embodied.teachers import episode_log
    from embodied.teachers.plots.level_gallery import chosen

    run(tmp_path / "run", node("domain_randomization"))
    assert "that the teacher sampled" in write(tmp_path / "run").read_text()
    picture = np.asarray(decode_image((tmp_path / "run" / task_sampling.FILE).read_bytes()))
    goals = (picture[..., :3] == np.array(GOAL)).all(-1)  # no plot of points has this colour
    assert goals.sum() > 36 * 20
    past = episode_log.read_episode_log(tmp_path / "run")
    assert past is not None and past.task.shape[1] == 28
    assert chosen(np.arange(5)) == [0, 1, 2, 3, 4] and chosen(np.arange(17))[-1] == 16


@pytest.mark.parametrize(
    "words", ["learner=sac policy=gaussian", "learner=ppo policy=diagonal_gaussian"]
)
def test_a_teacher_of_tasks_is_in_the_log(tmp_path: Path, words: str) -> None:
    """Off-policy and on-policy, by the command line."""
    small = "steps=600 log_every=200 eval_every=0 save_every=0 video=false eval.episodes=2"
    task = f"env=fr3_reach env.num_envs=2 teacher=mpts out={tmp_path}/run"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", *f"{task} {words} {small}".split()])
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    logged = [line for line in map(json.loads, lines) if "train/steps_per_second" in line]
    assert len(logged) >= 2 and all("train/teacher_correlation" in line for line in logged)


def test_how_the_teacher_does_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, float]] = []
    monkeypatch.setattr(Log, "write", lambda log, step, row: rows.append(dict(row)))
    run(tmp_path / "run", node("plr", log_every=96))
    seen = [row for row in rows if "train/teacher_library" in row]
    assert seen[-1]["train/teacher_library"] == 12 and 0 < seen[-1]["train/teacher_again"] < 1
    assert 0 <= seen[0]["train/teacher_walls"] <= 8 and seen[0]["train/teacher_way"] >= 1
