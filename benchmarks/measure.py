"""Side-by-side measurement in one process, in interleaved blocks.

A ratio is computed per pair of adjacent blocks and the median reported: clock drift and other
processes slow both halves of a pair and cancel.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

Block = Callable[[], int]
Clock = Callable[[], float]
cpu_time = time.process_time  # of all threads; other processes hardly change it
PACKAGES = ("torch", "numpy", "mujoco", "gymnasium", "envpool", "stable-baselines3", "diffusers")


@dataclass(frozen=True)
class Comparison:
    """Ours against theirs, items per second; `ratios` holds ours/theirs, one per pair of blocks.

    `unit` names the items ("steps", "updates"); `name`, `ours`, `theirs` label the table's line. A
    measurement without a peer has `theirs_rate` and ratios of NaN.
    """

    ours_rates: tuple[float, ...]
    theirs_rates: tuple[float, ...] = ()
    name: str = ""
    unit: str = "steps"
    target: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.ours_rates, self.theirs_rates, strict=False))

    @property
    def ratio_median(self) -> float:
        return float(np.median(self.ratios)) if self.ratios else float("nan")

    @property
    def ratio_iqr(self) -> tuple[float, float]:
        """The quartiles (25%, 75%) of the ratio."""
        return quartiles(self.ratios)

    @property
    def ours_rate(self) -> float:
        return float(np.median(self.ours_rates))

    @property
    def theirs_rate(self) -> float:
        return float(np.median(self.theirs_rates)) if self.theirs_rates else float("nan")

    def to_json(self) -> dict[str, Any]:
        summary = {
            "ours_rate": self.ours_rate,
            "theirs_rate": self.theirs_rate if self.theirs_rates else None,
            "ratio_median": self.ratio_median if self.ratios else None,
            "ratio_iqr": list(self.ratio_iqr) if self.ratios else None,
        }
        return asdict(self) | summary


def compare(
    ours: Block,
    theirs: Block,
    repeats: int = 5,
    name: str = "",
    unit: str = "steps",
    target: float | None = None,
    clock: Clock = time.perf_counter,
) -> Comparison:
    """Time `ours` and `theirs` alternately, `repeats` pairs after one warm-up of each.

    Each callable runs one block of work (aim at 0.1 to 1 s) and returns the number of items; a
    callable on a GPU must synchronise before it returns. The order within a pair alternates, so
    that going first favours neither side. `target` is the ratio to reach. `clock` returns seconds;
    on a busy machine `cpu_time`.
    """
    ours()
    theirs()
    ours_rates, theirs_rates = [], []
    for pair in range(repeats):
        sides = [(ours, ours_rates), (theirs, theirs_rates)]
        for block, rates in sides if pair % 2 == 0 else sides[::-1]:
            rates.append(rate(block, clock))
    return Comparison(tuple(ours_rates), tuple(theirs_rates), name, unit, target)


def alone(
    ours: Block, repeats: int = 5, name: str = "", unit: str = "steps", target: float | None = None
) -> Comparison:
    """Time `ours` without a peer; `target` is then a rate, items per second."""
    ours()
    return Comparison(tuple(rate(ours) for _ in range(repeats)), (), name, unit, target)


def rate(block: Block, clock: Clock = time.perf_counter) -> float:
    """Items per second of one run of `block`."""
    start = clock()
    items = block()
    return items / (clock() - start)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The 25% and 75% quantiles of `values` (NaN when there are none)."""
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def machine() -> dict[str, Any]:
    """The hardware and software: processor, cores, threads, GPU, Python and package versions."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
    }


def processor() -> str:
    """The processor's model name, if the system reports it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of `packages`; those not installed are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(path: Path | str, name: str, comparisons: Sequence[Comparison]) -> Path:
    """Write raw rates, summaries and the machine to `path` (a folder: `path/name.json`)."""
    path = Path(path)
    path = path if path.suffix == ".json" else path / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "name": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "rows": [comparison.to_json() for comparison in comparisons],
    }
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    return path


def table(rows: Sequence[Comparison], title: str = "", console: Console | None = None) -> None:
    """Print one line per comparison: both rates, the median ratio, its quartiles, the target."""
    shown = Table(title=title or None)
    shown.add_column("measurement")
    for heading in ("ours /s", "theirs /s", "ratio", "quartiles", "target"):
        shown.add_column(heading, justify="right")
    for row in rows:
        low, high = row.ratio_iqr
        peer = (f"{row.theirs_rate:,.0f}", f"{row.ratio_median:.2f}", f"{low:.2f} to {high:.2f}")
        shown.add_row(
            f"{row.name} ({row.unit})",
            f"{row.ours_rate:,.0f}",
            *(peer if row.ratios else ("", "", "")),
            "" if row.target is None else f"{row.target:,g}",
        )
    (console or Console()).print(shown)
