"""Matrix products, and the latency of one decision of a policy, eager and captured."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.on_gpu.rows import Row, Scale, attempted, rate, shrunk
from benchmarks.policy import GRAPHS, SPEC
from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.policy import Policy

WARM = 10  # decisions before the timed ones


def products(device: torch.device, scale: Scale) -> Iterator[Row]:
    """TFLOP/s of a square product in float32, TF32 and bfloat16: what the learners could reach."""
    n = 8192 if len(scale.envs) > 1 else 8

    def measure(precision: str, dtype: torch.dtype) -> tuple[float, str]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            one, other = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            each = rate(lambda: one @ other, min(scale.calls, 20))
        finally:
            torch.set_float32_matmul_precision(before)
        return each * 2 * n**3 / 1e12, f"{n} x {n}"

    kinds = {
        "float32": ("highest", torch.float32),
        "TF32": ("high", torch.float32),
        "bfloat16": ("highest", torch.bfloat16),
    }
    yield from (
        attempted(f"product, {name}", "TFLOP/s", lambda k=kind: measure(*k))
        for name, kind in kinds.items()
    )


def decisions(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Milliseconds from an observation on the host to actions on the host, batch 1."""
    for name in GRAPHS:
        for mode in ("eager", "captured") if "cuda_graph" in scale.backends else ("eager",):
            graph = mode == "captured"
            yield attempted(
                f"{name}, {mode}",
                "ms",
                lambda n=name, g=graph: latency(actor(n, g, device, scale), scale),
            )


def actor(name: str, graph: bool, device: torch.device, scale: Scale) -> Actor:
    torch.manual_seed(0)
    policy = build(shrunk(GRAPHS[name], scale), Policy, spec=SPEC).to(device).eval()
    return Actor(policy, 1, execute=1, cuda_graph=graph)


def latency(decide: Actor, scale: Scale) -> tuple[float, str]:
    """The median; the 99th percentile as a note."""
    first, seconds = torch.zeros(1, dtype=torch.bool), list[float]()
    obs = {"state": torch.randn(1, SPEC.obs["state"].size)}
    for _ in range(WARM + scale.calls):
        began = time.perf_counter()
        decide(obs, first)  # returns on the host: the device is done
        seconds.append(time.perf_counter() - began)
    median, late = np.percentile(1e3 * np.array(seconds[WARM:]), [50, 99])
    return float(median), f"p99 {late:.3f} ms"
