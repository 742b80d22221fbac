"""A GPU: checks that everything runs on it and measures it, in at most 25 minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import main, put_root_on_path
from benchmarks.measure import machine
from benchmarks.on_gpu import decisions, environments, runs, updates
from benchmarks.on_gpu.rows import Row, Scale, one_line
from embodied.core.atomic_write import write_json
from embodied.core.device import accelerator, pick_device

Part = Callable[[torch.device, Scale], Iterator[Row]]
MINUTES = 25.0
UNFINISHED = "interrupted"
PARTS: Mapping[str, tuple[Part, float]] = {
    "checks": (runs.checks, 180),
    "waits": (runs.waits, 90),
    "products": (decisions.products, 30),
    "sac": (lambda d, s: updates.off_policy("sac", d, s), 120),
    "td3": (lambda d, s: updates.off_policy("td3", d, s), 120),
    "ppo": (updates.on_policy, 120),
    "flashsac": (lambda d, s: updates.off_policy("flashsac", d, s), 150),
    "fasttd3": (lambda d, s: updates.off_policy("fasttd3", d, s), 120),
    "decisions": (decisions.decisions, 60),
    "quadrotor": (environments.quadrotor, 120),
    "maze": (environments.maze, 60),
    "loops": (runs.loops, 150),
    "warp": (environments.warp, 240),
    "maniskill": (environments.maniskill, 150),
    "demo": (runs.demo, 300),
}
"""The parts in order, each with the seconds after which it is ended."""


def run(out: Path | str = "bench", device: torch.device | None = None) -> list[Row]:
    """Run the parts that `out/gpu` has no results of, each in a process of its own; then write
    `out/gpu.json` and `out/gpu.md` and print the table. Without a GPU, says so and does nothing.

    An interrupted run goes on where it was; a part that failed is tried again.
    """
    if device is None and accelerator() is None:
        print("torch finds no GPU here: benchmarks.gpu measures nothing")
        return []
    device = device or pick_device("auto")
    folder, end = Path(out) / "gpu", time.monotonic() + 60 * MINUTES
    for name, (_, limit) in PARTS.items():
        if not done(folder / f"{name}.json"):
            print(f"{name} ...", flush=True)
            separately(name, folder, device, min(limit, end - time.monotonic()))
    return written(Path(out), device)


def done(file: Path) -> bool:
    """Whether a part ran to its end (its rows may say that something failed)."""
    return file.exists() and json.loads(file.read_text())["error"] is None


def separately(name: str, folder: Path, device: torch.device, seconds: float) -> None:
    """One part in its own process: a broken CUDA context ends with it."""
    if seconds < 10:
        save(folder, name, [], f"the {MINUTES:g} minutes are over: run it again to go on")
        return
    put_root_on_path()
    command = [sys.executable, "-m", "benchmarks.on_gpu", name, str(folder), str(device)]
    try:
        ended = subprocess.run(
            command, timeout=seconds, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        save(folder, name, rows_of(folder / f"{name}.json"), f"not done within {seconds:.0f} s")
        return
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        save(folder, name, rows_of(folder / f"{name}.json"), lines[-1])


def part(name: str, folder: Path, device: torch.device, scale: Scale) -> None:
    """Measure one part in this process; each row is saved once it is measured, and at last
    the error, if one ended the part."""
    rows, error = list[Row](), None
    save(folder, name, rows, UNFINISHED)
    try:
        for row in PARTS[name][0](device, scale):
            rows.append(row)
            save(folder, name, rows, UNFINISHED)
    except Exception as failed:  # what a driver or a missing package raises
        error = one_line(failed)
    save(folder, name, rows, error)


def save(folder: Path, name: str, rows: list[Row], error: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"rows": [asdict(row) for row in rows], "error": error}
    write_json(folder / f"{name}.json", found)


def written(out: Path, device: torch.device) -> list[Row]:
    """Put the parts together: `gpu.json`, `gpu.md`, and the table on the terminal."""
    about = machine() | {"device": gpu_name(device)}
    found = {name: loaded(out / "gpu" / f"{name}.json") for name in PARTS}
    parts = {name: [asdict(row) for row in rows] for name, rows in found.items()}
    write_json(out / "gpu.json", {"machine": about, "parts": parts})
    text = markdown(found, about)
    (out / "gpu.md").write_text(text)
    print(f"\n{text}\nwritten: {out / 'gpu.md'}, {out / 'gpu.json'}")
    return [row for rows in found.values() for row in rows]


def rows_of(file: Path) -> list[Row]:
    """The rows that a part has saved."""
    return [Row(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []


def loaded(file: Path) -> list[Row]:
    """A part's rows, with one more for an error that ended it."""
    if not file.exists():
        return []
    error = json.loads(file.read_text())["error"]
    return rows_of(file) + ([] if error is None else [Row(file.stem, error=error)])


def gpu_name(device: torch.device) -> str:
    """The GPU's own name; that of the device where it has none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def markdown(parts: Mapping[str, list[Row]], about: Mapping[str, Any]) -> str:
    """The table as a Markdown page."""
    lines = [
        f"# {about['device']}",
        "",
        f"torch {about['versions']['torch']}, {about['processor']}",
    ]
    lines += ["", "| part | measurement | value | unit | note |", "|---|---|---|---|---|"]
    for name, rows in parts.items():
        for row in rows:
            value = "" if row.value is None else f"{row.value:,.4g}"
            note = f"failed: {row.error}" if row.error is not None else row.note
            cells = (name, row.name, value, row.unit, note.replace("|", "/"))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(run)
