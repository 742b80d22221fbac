"""Row and Scale of the GPU bench, and how it times a block."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One measurement or check. `value` is None where only `note` says something; `error` is what
    was raised, in one line."""

    name: str
    value: float | None = None
    unit: str = ""
    note: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Scale:
    """How large the bench is; the default is for a GPU, `TINY` for a test of its code.

    `envs`: numbers of parallel environments; `calls`: timed updates or decisions; `steps`: timed
    vector steps; `shrink`: replaces settings of learners and policies by name; `backends`: ways to
    run an update.
    """

    envs: tuple[int, ...] = (1024, 4096, 16384)
    calls: int = 200
    steps: int = 100
    stored: int = 200_000
    shrink: Mapping[str, Any] = field(default_factory=dict[str, Any])
    backends: tuple[str, ...] = ("eager", "compile", "cuda_graph", "compile+cuda_graph")


TINY = Scale(
    envs=(4,),
    calls=2,
    steps=3,
    stored=64,
    shrink={"hidden": [8], "width": 8, "batch_size": 8, "horizon": 4, "epochs": 1},
    backends=("eager",),
)


def shrunk(node: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """A node with the settings of `scale.shrink` that it has."""
    return {key: scale.shrink.get(key, value) for key, value in node.items()}


def attempted(name: str, unit: str, measure: Callable[[], tuple[float, str]]) -> Row:
    """A row of `measure` (value and note), or of its error: one failure does not end the others."""
    try:
        value, note = measure()
    except Exception as error:  # whatever a driver, compiler or simulator raises
        return Row(name, unit=unit, error=one_line(error))
    return Row(name, value, unit, note)


def one_line(error: BaseException) -> str:
    """An error's kind and first line (PyTorch's last lines are advice)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def rate(work: Callable[[], object], count: int, repeats: int = 3) -> float:
    """Calls per second of `work`: the median of `repeats` blocks of `count`, after one call."""
    work()
    rates: list[float] = []
    for _ in range(repeats):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            work()
        torch.accelerator.synchronize()
        rates.append(count / (time.perf_counter() - began))
    return sorted(rates)[repeats // 2]
