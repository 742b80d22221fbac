"""Diary: every episode's task and what came of it, one line each, in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied.teachers.task_space import Floats

FILE = "tasks.jsonl"


class Diary:
    """Appends to `file`; a resumed run cuts off what came after its checkpoint."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, tickets: Sequence[int], tasks: Floats, columns: dict[str, Floats]) -> None:
        """Episodes that ended: tasks [n, D] in [0, 1] and, by name, numbers [n] (NaN: unknown)."""
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
class Past:
    """Of n episodes, in the order in which they ended: when each began (its number), its task
    [n, D], return, success (NaN: not known) and length [n]."""

    began: Floats
    task: Floats
    ret: Floats
    success: Floats
    length: Floats


def read(folder: Path) -> Past | None:
    """What the diary of a run holds; None where there is none. A line cut in half is left out."""
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
    return Past(column("episode"), np.array([row["task"] for row in rows]), *parts)


def _number(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
