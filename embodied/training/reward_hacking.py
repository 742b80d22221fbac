"""Alarm: what the learner is paid rises while the task succeeds less often.

A reward that stands in for the world's own is a proxy, and a policy can learn to please it alone
(Goodhart's law). At every evaluation the mean reward of the newest rows is put beside the success
that the world saw; `PATIENCE` evaluations in a row in which the one went up and the other down
ring. The history is what metrics.jsonl holds, so that a resumed run goes on with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from embodied.core.reward import HasComponents, Reward
from embodied.core.tensors import Tensors
from embodied.training.logger import Log, read_metrics

PATIENCE = 3
NEWEST = 1024  # rows that are looked at, at most
PROXY, SUCCESS, RINGS = "reward/proxy", "eval/success", "reward/alarm"


@runtime_checkable
class Paying(Protocol):
    """A loop that gives rows a reward of its own; `paid` says what since it was last asked."""

    def paid(self) -> Mapping[str, float | Tensor]: ...


def watch(loop: object, log: Log, step: int, result: Mapping[str, float]) -> None:
    """After an evaluation: log what was paid beside it, and say once when the two part."""
    paid = loop.paid() if isinstance(loop, Paying) else {}
    if PROXY not in paid or SUCCESS not in result or log.silent:
        log.write(step, {**result, **paid})
        return
    past = evaluations(log.folder, step - 1)
    now = [*past, (float(paid[PROXY]), result[SUCCESS], step)]
    log.write(step, {**result, **paid, RINGS: float(rings(now))})
    if rings(now) and not rung(past):
        log.warn(
            f"over the last {PATIENCE} evaluations the reward rose while success fell (now "
            f"{result[SUCCESS]:.0%}): the policy may please the reward instead of doing the task"
        )


def describe(reward: Reward, rows: Tensors, paid: Tensor | None = None) -> dict[str, Tensor]:
    """Means of what `rows` were paid, and of each part of it where the reward has parts."""
    means = {} if paid is None else {PROXY: paid.float().mean()}
    if isinstance(reward, HasComponents):
        with torch.no_grad():
            terms = reward.components(rows)
        means |= {f"reward/{name}": value.float().mean() for name, value in terms.items()}
    return means


def evaluations(folder: Path, step: int | None = None) -> list[tuple[float, float, int]]:
    """(proxy, success, step) of every evaluation that a run's log has, up to `step`."""
    rows: list[dict[str, Any]] = [r for r in read_metrics(folder) if PROXY in r and SUCCESS in r]
    return [(r[PROXY], r[SUCCESS], r["step"]) for r in rows if step is None or r["step"] <= step]


def rung(history: Sequence[tuple[float, float, int]]) -> bool:
    """Whether the alarm has ever rung."""
    return any(rings(history[: n + 1]) for n in range(len(history)))


def rings(history: Sequence[tuple[float, float, int]], patience: int = PATIENCE) -> bool:
    """Whether the proxy rose and success fell at each of the last `patience` evaluations."""
    last = history[-patience - 1 :]
    parted = [b[0] > a[0] and b[1] < a[1] for a, b in pairwise(last)]
    return len(parted) == patience and all(parted)
