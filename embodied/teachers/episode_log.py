"""EpisodeLog: the task and the outcome of every training episode, a JSON line each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied.teachers.task_space import Floats

FILE = "tasks.jsonl"


class EpisodeLog:
    """Appends to `file`; a resumed run truncates it to the length at its checkpoint."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, tickets: Sequence[int], tasks: Floats, columns: dict[str, Floats]) -> None:
        """Add finished episodes: tasks [n, D] in [0, 1] and named numbers [n] (NaN: unknown)."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for i, ticket in enumerate(tickets):
            values = {name: _number(column[i]) for name, column in columns.items()}
            task = [round(float(value), 5) for value in tasks[i]]
            lines.append(json.dumps({"episode": ticket, "task": task, **values}))
        with self.file.open("a") as sink:
            sink.write("".join(f"{line}\n" for line in lines))

    def get_state(self) -> dict[str, Any]:
        return {"bytes": self.file.stat().st_size if self.file.exists() else 0}

    def set_state(self, state: dict[str, Any]) -> None:
        if self.file.exists() and self.file.stat().st_size > state["bytes"]:
            with self.file.open("r+b") as file:
                file.truncate(state["bytes"])


@dataclass(frozen=True)
class LoggedEpisodes:
    """n episodes in the order in which they ended: `began` [n] (their tickets, in order of
    their start), `task` [n, D], `ret`, `success` (NaN: unknown) and `length` [n]."""

    began: Floats
    task: Floats
    ret: Floats
    success: Floats
    length: Floats


def read_episode_log(folder: Path) -> LoggedEpisodes | None:
    """The episode log of the run in `folder`; None if there is none. Broken lines are skipped."""
    file = folder / FILE
    if not file.exists():
        return None
    rows = []
    for line in file.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    if not rows:
        return None

    def column(name: str) -> Floats:
        return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=float)

    parts = (column("return"), column("success"), column("length"))
    return LoggedEpisodes(column("episode"), np.array([row["task"] for row in rows]), *parts)


def _number(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
