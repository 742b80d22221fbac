"""Plots the tasks that a run's teacher sampled, over task space or as a gallery of levels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embodied.core import checkpoint
from embodied.core.build import build
from embodied.core.env import HasLevels, VecEnv
from embodied.core.saved_node import read_run_settings, require_inside
from embodied.core.wrapper import find_protocol
from embodied.teachers.teacher import LEVEL, Floats, LevelSpace, LoggedEpisodes

FILE = "tasks.png"


def picture(folder: Path, past: LoggedEpisodes) -> Path:
    """Write RUN/tasks.png; needs the spec in the run's checkpoint, and matplotlib."""
    task = checkpoint.load_spec(folder).task
    if task is not None and task.unit == LEVEL:
        return _levels(folder, past)
    from embodied.teachers.plots.task_density import draw

    moving = [i for i in range(past.task.shape[1]) if np.ptp(past.task[:, i]) > 1e-6] or [0]
    names = tuple(task.names[i] for i in moving) if task and task.names else ()
    names = names or tuple(f"task{i}" for i in moving)
    return draw(folder / FILE, past.began, past.task[:, moving], _scores(past), names)


def _levels(folder: Path, past: LoggedEpisodes) -> Path:
    from embodied.teachers.plots.task_density import draw_levels as draw

    node = read_run_settings(folder / "run.yaml")["env"]
    require_inside(node, folder / "run.yaml")
    env = build(node | {"num_envs": 1}, VecEnv)
    levelled = find_protocol(env, HasLevels)
    assert levelled is not None
    space: LevelSpace = levelled.levels
    try:
        return draw(folder / FILE, past.began, past.task, _scores(past), space.picture)
    finally:
        env.close()


def _scores(past: LoggedEpisodes) -> Floats:
    """[n] in [0, 1]: success or, if the environment does not report it, the normalised return."""
    if np.isfinite(past.success).any():
        return past.success
    return (past.ret - past.ret.min()) / max(float(np.ptp(past.ret)), 1e-9)
