"""Demonstrations: reads recorded episodes as transitions or action chunks for a learner."""

from __future__ import annotations

from pathlib import Path

import torch

from embodied.buffers.source import Source
from embodied.buffers.trajectory_columns import columns_of_episodes
from embodied.buffers.weighted import Weighted, Weights
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import require_same
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.datasets.transitions import Dataset, chunks, joined, transitions
from embodied.learners.learner import Learner
from embodied.training.config import RunConfig


def read_demonstrations(config: RunConfig, env: VecEnv) -> Episodes | None:
    """The episodes of `config.demos`; SpecMismatch if they are of another environment."""
    if config.demos is None:
        return None
    parts: list[Episodes] = []
    for path in [config.demos] if isinstance(config.demos, str) else config.demos:
        parts.append(read_episodes(Path(path), limit=config.demo_episodes))
        require_same(env.spec, parts[-1].spec, "environment", f"dataset {path}")
    return joined(parts)


def rows_for(episodes: Episodes, policy: Policy, learner: Learner, execute: int | None) -> Tensors:
    """What `learner` samples: action chunks, or transitions that span `execute` steps."""
    if learner.rows == "chunks":
        return chunks(episodes, policy.chunk)
    if learner.policy is not policy:
        raise ConfigError(
            "this finetune method cannot use demonstrations, because its learner's actions are not "
            "the robot's: leave out demos"
        )
    steps = execute or policy.chunk
    rows = transitions(episodes, learner.gamma, steps, learner.n_step)
    del rows["episode"]  # transitions from the environment have no such column
    width = max(steps, learner.n_step)
    return rows | columns_of_episodes(episodes, rows, learner.columns, learner.gamma, width)


def source_of(
    rows: Tensors, episodes: Episodes, config: RunConfig, device: torch.device
) -> Dataset | Weighted:
    """A source of the demonstrations' `rows`, weighted by `config.weighting` if it is set."""
    if config.weighting is None:
        return Dataset(rows, device)
    weights: Weights = build(config.weighting)
    each = weights(episodes).repeat_interleave(episodes.length)
    return Weighted(rows, each, device)


def metrics_of(source: Source | None) -> dict[str, float]:
    """Metrics of a weighted source: its number of transitions and the effective sample size."""
    if not isinstance(source, Weighted):
        return {}
    return {"data/rows": len(source), "data/effective_rows": source.effective}
