"""Acceleration: settings that make an update faster and change nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Acceleration:
    """How an update runs; the results are the same up to rounding."""

    compile: bool = False  # compile the losses with torch.compile (for GPUs; slower on a CPU)
    cuda_graph: bool = False  # record the update as a CUDA graph and replay it (GPUs only)
