"""How long a policy takes to answer: median and 99th percentile at batch 1, one CPU thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

import configs
from embodied.bench.measure import Comparison, alone, write_json
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec

SPEC = Spec({"state": Leaf((32,))}, Leaf((7,), low=-1.0, high=1.0), dt=0.05)
DISCRETE = SPEC.with_act(Leaf((), "int64", 0, 16))
CHUNK = 8
TARGETS = {"flow": 3.0}  # ms, median


def run(out: Path | str = "bench", repeats: int = 5, calls: int = 200) -> list[Comparison]:
    """Measure every policy of configs/policy, print the table, write `out/policy.json`.

    Each answers `repeats` blocks of `calls` decisions (noise drawn, 32 numbers in, a chunk of 8
    actions of 7 numbers out). Seconds in all.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [measure(path, repeats, calls) for path in files()]
    finally:
        torch.set_num_threads(threads)
    show(rows)
    write_json(Path(out), "policy", rows)
    return rows


def files() -> list[Path]:
    """The YAML of every policy that ships."""
    return sorted((Path(configs.__path__[0]) / "policy").glob("*.yaml"))


def measure(path: Path, repeats: int, calls: int) -> Comparison:
    """One policy with random weights; `notes` hold the latencies of single decisions (ms)."""
    torch.manual_seed(0)
    policy = made({**yaml.safe_load(path.read_text()), "chunk": CHUNK})
    decide, seconds = deciding(policy.eval()), []

    def block() -> int:
        for _ in range(calls):
            start = time.perf_counter()
            decide()
            seconds.append(time.perf_counter() - start)
        return calls

    row = alone(block, repeats, path.stem, "decisions")
    median, worst = np.percentile(1e3 * np.array(seconds[calls:]), [50, 99])  # without the warm-up
    notes = {"median_ms": float(median), "p99_ms": float(worst)}
    return replace(row, notes={**notes, "target_ms": TARGETS.get(path.stem)})


def made(node: dict[str, Any]) -> Policy:
    """The policy of `node` for continuous actions or, where it refuses them, discrete ones."""
    try:
        return build(node, spec=SPEC)
    except ConfigError:
        return build(node, spec=DISCRETE)


def deciding(policy: Policy) -> Callable[[], object]:
    """One decision from a fixed observation."""
    obs = {"state": torch.randn(1, SPEC.obs["state"].size)}

    @torch.no_grad()
    def decide() -> object:
        noise = policy.draw(1)
        seen, carry = policy.observe(obs, policy.initial(1), noise)
        return policy.act(seen, carry, noise)

    return decide


def show(rows: list[Comparison], console: Console | None = None) -> None:
    """Print one line per policy."""
    shown = Table(title="one decision, batch 1, one CPU thread (ms)")
    shown.add_column("policy")
    for heading in ("median", "99th percentile", "target"):
        shown.add_column(heading, justify="right")
    for row in rows:
        target = row.notes["target_ms"]
        shown.add_row(
            row.name,
            f"{row.notes['median_ms']:.2f}",
            f"{row.notes['p99_ms']:.2f}",
            "" if target is None else f"{target:g}",
        )
    (console or Console()).print(shown)
