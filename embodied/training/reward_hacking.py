"""Reward-hacking detector: warns when the learned reward rises while task success falls.

A reward that stands in for the environment's own is a proxy, and a policy can learn to maximise it
alone (Goodhart's law). At every evaluation the mean reward of the newest transitions is logged
beside the success rate; `PATIENCE` evaluations in a row in which the one rose and the other fell
give a warning. The history is read from metrics.jsonl, so that a resumed run continues it.
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
NEWEST = 1024  # transitions whose mean reward is logged, at most
PROXY, SUCCESS, ALARM = "reward/proxy", "eval/success", "reward/alarm"


@runtime_checkable
class HasMeanReward(Protocol):
    """A training loop with a reward of its own."""

    def mean_reward(self) -> Mapping[str, float | Tensor]:
        """Mean rewards, and of each component, since the last call; empty without a reward."""


def log_evaluation(loop: object, log: Log, step: int, result: Mapping[str, float]) -> None:
    """Log an evaluation with the mean reward beside it; warn once when the two diverge."""
    rewards = loop.mean_reward() if isinstance(loop, HasMeanReward) else {}
    if PROXY not in rewards or SUCCESS not in result or log.silent:
        log.write(step, {**result, **rewards})
        return
    past = evaluations(log.folder, step - 1)
    now = [*past, (float(rewards[PROXY]), result[SUCCESS], step)]
    log.write(step, {**result, **rewards, ALARM: float(diverging(now))})
    if diverging(now) and not ever_diverged(past):
        log.warn(
            f"over the last {PATIENCE} evaluations the reward rose while success fell (now "
            f"{result[SUCCESS]:.0%}): the policy may exploit the reward instead of doing the task"
        )


def describe(reward: Reward, rows: Tensors, rewards: Tensor | None = None) -> dict[str, Tensor]:
    """Means of the `rewards` of transitions `rows`, and of each component of the reward."""
    means = {} if rewards is None else {PROXY: rewards.float().mean()}
    if isinstance(reward, HasComponents):
        with torch.no_grad():
            terms = reward.components(rows)
        means |= {f"reward/{name}": value.float().mean() for name, value in terms.items()}
    return means


def evaluations(folder: Path, step: int | None = None) -> list[tuple[float, float, int]]:
    """(proxy, success, step) of every evaluation that a run's log has, up to `step`."""
    rows: list[dict[str, Any]] = [r for r in read_metrics(folder) if PROXY in r and SUCCESS in r]
    return [(r[PROXY], r[SUCCESS], r["step"]) for r in rows if step is None or r["step"] <= step]


def ever_diverged(history: Sequence[tuple[float, float, int]]) -> bool:
    """Whether there was ever a warning."""
    return any(diverging(history[: n + 1]) for n in range(len(history)))


def diverging(history: Sequence[tuple[float, float, int]], patience: int = PATIENCE) -> bool:
    """Whether the proxy rose and success fell at each of the last `patience` evaluations."""
    last = history[-patience - 1 :]
    diverged = [b[0] > a[0] and b[1] < a[1] for a, b in pairwise(last)]
    return len(diverged) == patience and all(diverged)
