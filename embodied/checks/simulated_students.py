"""Simulated students: outcomes of episodes for a teacher that is checked or measured alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.core.build import build
from embodied.core.complete_node import complete
from embodied.core.spec import Spec
from embodied.teachers.teacher import Outcome, Teacher

PLAYER = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "reach", "quality": 1.0}
ROWS = 16  # parallel episodes
STEPS = 50  # FR3 reach: its horizon
FILL = "none"  # the mode that fills the archive


def ready(node: Mapping[str, Any], spec: Spec, folder: Path) -> dict[str, Any]:
    """`node` with what users must provide: an archive of two past students, or a second agent."""
    node = complete(node)
    if "archive" not in node:
        return {**node, "player": PLAYER} if "player" in node else dict(node)
    room = folder / "archive"
    if not room.exists():
        for seed in (1, 2):
            past = {**node, "archive": str(room), "stepping": FILL, "epoch": 600}
            teaching(build(past, Teacher, spec=spec, seed=seed), 600)()
    return {**node, "archive": str(room), "epoch": 600, "lively": 0.02}


def teaching(teacher: Teacher, episodes: int) -> Callable[[], int]:
    """Blocks of `episodes` episodes, ROWS in parallel, ending one at a time in random order; the
    student succeeds in a growing part of the task space, and from every saved state."""
    random, played = np.random.default_rng(0), 0
    rival = getattr(teacher, "rival", None)  # the antagonist plays as many episodes
    task, ticket = teacher.sample(ROWS)

    def block() -> int:
        nonlocal played
        for _ in range(episodes):
            row = int(random.integers(ROWS))
            reach = min(0.3 + played / 2000, 1.2)
            far = float(task[row].norm()) if task.is_floating_point() else 0.0
            won = float(random.random() < np.exp(-4 * max(far - reach, 0)))
            teacher.update(ticket[row : row + 1], outcome(won))
            task[row], ticket[row] = (value[0] for value in teacher.sample(1))
            if rival is not None:
                rival.update(rival.sample(1)[1], outcome(1 - won))
            played += 1
        return episodes

    return block


def outcome(score: float) -> Outcome:
    """An episode with return `score`, successful if that is 1; the student's values are half."""
    value = torch.tensor([score])
    return Outcome(value, value, torch.tensor([float(STEPS)]), value / 2, value / 2, value / 2)
