"""Latency that a policy server adds to one decision, on this machine's loopback address.

The served policy does nothing but sample noise, so the time is that of the wire: packing, two trips
through the kernel, unpacking and checking on both sides. The server is a process of its own.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import main
from benchmarks.measure import Comparison, write_json
from embodied.core.build import allow, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.policies.remote.address import PACKAGE, remote_policy
from embodied.serve.policy_service import PolicyService
from embodied.serve.server import Server

STATE = Leaf((14,))
PICTURE = Leaf((224, 224, 3), "uint8", 0, 255)
ACT = Leaf((7,), low=-1.0, high=1.0)
SPECS = {
    "14 numbers": Spec({"state": STATE}, ACT, dt=0.05),
    "14 numbers, two 224 x 224 pictures": Spec(
        {"state": STATE, "front": PICTURE, "wrist": PICTURE}, ACT, dt=0.05
    ),
}
BATCHES = (1, 16)
TARGET = 500.0  # decisions per second: 2 ms each, for one environment
NODE = {"_target_": "embodied.policies.random.Random"}


def run(out: Path | str = "bench", repeats: int = 5, calls: int = 200) -> list[Comparison]:
    """Time `repeats` blocks of `calls` decisions for each kind of observation and batch; print the
    table, write `out/remote.json`. Takes seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    allow(PACKAGE)
    try:
        rows = [row for name in SPECS for row in measure(name, repeats, calls)]
    finally:
        torch.set_num_threads(threads)
    show(rows)
    write_json(Path(out), "remote", rows)
    return rows


def measure(name: str, repeats: int, calls: int) -> list[Comparison]:
    """One line for each batch, of observations like `SPECS[name]`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(name, theirs), daemon=True)
    server.start()
    theirs.close()  # so that a server that dies is noticed
    try:
        policy = remote_policy(ours.recv(), SPECS[name])
        return [decisions(policy, name, batch, repeats, calls) for batch in BATCHES]
    finally:
        ours.send(None)
        server.join(10)


def decisions(policy: Policy, name: str, batch: int, repeats: int, calls: int) -> Comparison:
    """Rate and latencies (ms) of decisions for `batch` environments."""
    obs = {key: _sample(leaf, batch) for key, leaf in policy.spec.obs.items()}
    noise, carry = policy.sample_noise(batch), policy.initial(batch)
    took: list[list[float]] = []
    for _ in range(repeats + 1):
        block: list[float] = []
        for _ in range(calls):
            began = time.perf_counter()
            policy.act(obs, carry, noise)
            block.append(time.perf_counter() - began)
        took.append(block)
    rates = tuple(calls / sum(block) for block in took[1:])  # the first one warms up
    ms = 1e3 * np.concatenate(took[1:])
    notes: dict[str, Any] = {
        "median_ms": float(np.median(ms)),
        "p99_ms": float(np.percentile(ms, 99)),
        "bytes": sum(value.nbytes for value in obs.values()),
    }
    target = TARGET if batch == 1 else None
    return Comparison(rates, (), f"{name}, batch {batch}", "decisions", target, notes)


def show(rows: list[Comparison]) -> None:
    """Print the latencies."""
    shown = Table("observation", "sent", "median", "p99", "decisions/s", "target")
    for row in rows:
        shown.add_row(
            row.name,
            f"{row.notes['bytes'] / 1e6:.2f} MB",
            f"{row.notes['median_ms']:.2f} ms",
            f"{row.notes['p99_ms']:.2f} ms",
            f"{row.ours_rate:,.0f}",
            "-" if row.target is None else f"{1e3 / row.target:g} ms",
        )
    Console(markup=False, highlight=False).print(shown)


def _sample(leaf: Leaf, batch: int) -> torch.Tensor:
    if leaf.is_image:
        return torch.randint(256, (batch, *leaf.shape)).to(torch.uint8)
    return torch.randn(batch, *leaf.shape)


def _serve(name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    policy = build(NODE, Policy, spec=SPECS[name])
    with Server(PolicyService(policy), port=0) as server:
        pipe.send(server.url)
        pipe.recv()


if __name__ == "__main__":
    main(run)
