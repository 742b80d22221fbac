"""Collected: what an actor process sends for one vector step, as bytes (safetensors)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import safetensors.numpy
import safetensors.torch
import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.env import Step
from embodied.core.tensors import Tensors

FLAGS = ("reward", "terminated", "truncated")


@dataclass(frozen=True)
class Collected:
    """The transitions `rows` that `step` completed in parallel envs `finished` (None: all), and the
    `version` of the weights that acted."""

    rows: Tensors
    step: Step
    finished: Tensor | None
    version: int


def encode(collected: Collected) -> bytes:
    """The message for `collected`; all tensors are copied."""
    step = collected.step
    leaves = {f"step/{name}": cast(Tensor, getattr(step, name)) for name in FLAGS}
    leaves |= tt.nest(step.obs, "step/obs") | tt.nest(step.log, "step/log")
    if step.next_obs is not step.obs:
        leaves |= tt.nest(step.next_obs, "step/next_obs")
    if collected.finished is not None:
        leaves["finished"] = collected.finished
    leaves |= tt.nest(collected.rows, "rows") | {"version": torch.tensor(collected.version)}
    return safetensors.numpy.save(tt.each(leaves, lambda leaf: leaf.contiguous().cpu().numpy()))  # type: ignore[arg-type]


def decode(message: bytes) -> Collected:
    """What `encode` was given."""
    leaves = safetensors.torch.load(message)
    obs = tt.under(leaves, "step/obs")
    reward, terminated, truncated = (leaves[f"step/{name}"] for name in FLAGS)
    following = tt.under(leaves, "step/next_obs") or obs
    step = Step(obs, following, reward, terminated, truncated, tt.under(leaves, "step/log"))
    version = int(leaves["version"])
    return Collected(tt.under(leaves, "rows"), step, leaves.get("finished"), version)


def joined(parts: list[Collected], starts: list[int], counts: list[int]) -> Collected:
    """One vector step of several actors; the parallel envs of part i begin at `starts[i]`, and are
    `counts[i]`."""
    if len(parts) == 1:
        return parts[0]
    rows = [part.rows for part in parts if part.rows]
    who = [
        start + _finished(part, count)
        for part, start, count in zip(parts, starts, counts, strict=True)
    ]
    steps = [part.step for part in parts]
    obs, following, log = (
        tt.cat([getattr(step, name) for step in steps]) for name in ("obs", "next_obs", "log")
    )
    reward, terminated, truncated = (
        torch.cat([getattr(step, name) for step in steps]) for name in FLAGS
    )
    together = Step(obs, following, reward, terminated, truncated, log)
    oldest = min(part.version for part in parts)
    return Collected(tt.cat(rows) if rows else {}, together, torch.cat(who), oldest)


def _finished(part: Collected, count: int) -> Tensor:
    """The parallel envs of its rows, numbered by itself."""
    if part.finished is not None:
        return part.finished
    return torch.arange(count if part.rows else 0)
