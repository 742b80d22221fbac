"""Inference latency of policies: one decision at batch size 1, on one CPU thread.

Every policy of configs/policy; then few sampler steps against many, the sampler's overhead over its
network and, on a GPU, the gain of a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.command import main
from benchmarks.measure import Block, Comparison, alone, compare, table, write_json
from embodied import configs
from embodied.core.build import ConfigError, build
from embodied.core.cuda_graph import Captured
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec

SPEC = Spec({"state": Leaf((32,))}, Leaf((7,), low=-1.0, high=1.0), dt=0.05)
DISCRETE = SPEC.with_act(Leaf((), "int64", 0, 16))
CHUNK = 8
TARGETS = {"flow": 3.0}  # ms, median
# The network size in the fine-tuning papers (DPPO, ReinFlow): three residual blocks of 512.
APART = ("tabular", "m2t2", "meta_dt", "prompt_dt")
SIZE = {"chunk": CHUNK, "width": 512, "depth": 3}
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", **SIZE}
DIFFUSION = {"_target_": "embodied.policies.generative.diffusion.Diffusion", **SIZE}
SHORTCUT = {"_target_": "embodied.policies.generative.shortcut.Shortcut", **SIZE, "steps": 1}
CONSISTENCY = {
    "_target_": "embodied.policies.generative.consistency.Consistency",
    **SIZE,
    "steps": 1,
}
# Target ratio of decisions per second: one sampler step against twenty of the same network.
FEW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shortcut, 1 step / flow, 20 steps": (SHORTCUT, FLOW | {"steps": 20}),
    "consistency, 1 step / flow, 20 steps": (CONSISTENCY, FLOW | {"steps": 20}),
    "consistency, 1 step / diffusion, 20 steps": (CONSISTENCY, DIFFUSION | {"steps": 20}),
}
SAMPLERS = {
    "flow, 20 steps / its network 20 times": FLOW | {"steps": 20},
    "diffusion, 20 steps / its network 20 times": DIFFUSION | {"steps": 20},
}
GRAPHS = {
    "flow, 20 steps": FLOW | {"steps": 20},
    "diffusion, 20 steps": DIFFUSION | {"steps": 20},
    "shortcut, 1 step": SHORTCUT,
}


def run(out: Path | str = "bench", repeats: int = 5, calls: int = 200) -> list[Comparison]:
    """Measure every policy of configs/policy, print the table, write `out/policy.json`.

    Each runs `repeats` blocks of `calls` decisions (noise sampled, 32 inputs, a chunk of 8 actions
    of 7 elements). The comparisons go to `out/policy_ratios.json`. Takes seconds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [measure(path, repeats, calls) for path in files()]
        ratios = comparisons(repeats, max(calls // 10, 1))
    finally:
        torch.set_num_threads(threads)
    show(rows)
    write_json(Path(out), "policy", rows)
    table(ratios, "decisions per second, batch 1, residual MLP 512 x 3")
    write_json(Path(out), "policy_ratios", ratios)
    return rows


def comparisons(repeats: int, calls: int) -> list[Comparison]:
    """Few sampler steps against many, samplers against their networks alone, CUDA graphs against
    eager."""
    rows = [
        compare(block(one, calls), block(many, calls), repeats, name, "decisions", 15.0)
        for name, (one, many) in FEW.items()
    ]
    rows += [
        compare(block(node, calls), bare(node, calls), repeats, name, "decisions", 0.95)
        for name, node in SAMPLERS.items()
    ]
    if torch.cuda.is_available():
        rows += [captured(name, node, repeats, 10 * calls) for name, node in GRAPHS.items()]
    return rows


def block(node: dict[str, Any], calls: int) -> Block:
    """`calls` decisions of a policy with random weights."""
    decide = deciding(made(node).eval())

    def run() -> int:
        for _ in range(calls):
            decide()
        return calls

    return run


def bare(node: dict[str, Any], calls: int) -> Block:
    """Calls of the network alone, as many as in the decisions of `block`."""
    policy: Any = made(node).eval()
    x, time = policy.sample_noise(1), policy.embedded()[0]
    features = policy.encoder({"state": torch.randn(1, SPEC.obs["state"].size)})

    @torch.no_grad()
    def run() -> int:
        for _ in range(calls * node["steps"]):
            policy.net.at(x, time, features)
        return calls

    return run


def captured(name: str, node: dict[str, Any], repeats: int, calls: int) -> Comparison:
    """A CUDA graph against eager calls, noise sampled in both; the goal is a factor of three."""
    policy = made(node).eval().cuda()
    obs = {"state": torch.randn(1, SPEC.obs["state"].size, device="cuda")}
    replay = Captured(policy)

    @torch.no_grad()
    def run(graph: bool) -> int:
        for _ in range(calls):
            noise = policy.sample_noise(1)
            if graph:
                replay(obs, {}, noise)
            else:
                policy.act(obs, {}, noise)
        torch.cuda.synchronize()
        return calls

    where = f"{name}, graph / eager on {torch.cuda.get_device_name()}"
    return compare(lambda: run(True), lambda: run(False), repeats, where, "decisions", 3.0)


def files() -> list[Path]:
    """The YAML of every policy but those that see symbols alone, or a lifetime of episodes."""
    every = sorted((Path(configs.__path__[0]) / "policy").glob("*.yaml"))
    return [file for file in every if file.stem not in APART]


def measure(path: Path, repeats: int, calls: int) -> Comparison:
    """One policy with random weights; `notes` has the latencies of single decisions (ms)."""
    torch.manual_seed(0)
    policy = made({**yaml.safe_load(path.read_text()), "chunk": CHUNK})
    decide, seconds = deciding(policy.eval()), []

    def timed() -> int:
        for _ in range(calls):
            start = time.perf_counter()
            decide()
            seconds.append(time.perf_counter() - start)
        return calls

    row = alone(timed, repeats, path.stem, "decisions")
    median, worst = np.percentile(1e3 * np.array(seconds[calls:]), [50, 99])  # without the warm-up
    notes = {"median_ms": float(median), "p99_ms": float(worst)}
    return replace(row, notes={**notes, "target_ms": TARGETS.get(path.stem)})


def made(node: dict[str, Any]) -> Policy:
    """The policy of `node` for continuous actions or, if it refuses them, discrete ones; without
    `chunk` where it takes none."""
    single = {key: value for key, value in node.items() if key != "chunk"}
    problem: ConfigError | None = None
    for settings, spec in product((node, single), (SPEC, DISCRETE)):
        try:
            return build(settings, Policy, spec=spec)
        except ConfigError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def deciding(policy: Policy) -> Callable[[], object]:
    """One decision from a fixed observation."""
    obs = {"state": torch.randn(1, SPEC.obs["state"].size)}

    @torch.no_grad()
    def decide() -> object:
        noise = policy.sample_noise(1)
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


if __name__ == "__main__":
    main(run)
