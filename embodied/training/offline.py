"""Offline training: every update samples from a fixed dataset; no environment steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from embodied.buffers.augment import augmented
from embodied.buffers.source import Source
from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.datasets.lerobot.reader import Episodes
from embodied.evaluation.held_out import HeldOut, held_out_episodes
from embodied.learners.learner import Learner
from embodied.training.config import Offline, RunConfig
from embodied.training.demonstrations import imitated, metrics_of, rows_for, source_of
from embodied.training.trainer import Trainer


class OfflineLoop:
    """Runs updates from `source`; the steps of the run count updates."""

    def __init__(
        self,
        learner: Learner,
        source: Source,
        data_metrics: Mapping[str, float] | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        self.learner, self.source = learner, source
        self.held_out = held_out
        self.teacher = None
        self.data_metrics: Mapping[str, float] = data_metrics or {}
        self.rewards = None

    def run(self, trainer: Trainer) -> None:
        while trainer.running:
            metrics = self.learner.update(self.source.sample(self.learner.batch_size))
            trainer.advance(1, metrics)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore: the dataset is read again, and sampling follows torch's generator."""


def build_offline(
    config: RunConfig,
    env: VecEnv | None,
    policy: Policy,
    learner: Learner,
    device: torch.device,
    episodes: Episodes | None,
) -> OfflineLoop:
    """The loop over `episodes`; normalizers are fitted to them. Without an environment some
    episodes are held out, to evaluate on."""
    assert isinstance(config.data, Offline)
    if episodes is None:
        raise ConfigError(
            "offline training needs demonstrations: embodied demos collect env=... out=DIR, then "
            "demos=DIR"
        )
    rows = rows_for(episodes, policy, learner, config.execute)
    learner.fit(rows)
    share = 0.0 if env is not None else config.data.held_out
    own = imitated(rows)
    usable = torch.stack([part.any() for part in own.split(episodes.length.tolist())])
    held = held_out_episodes(usable, share)
    source = source_of(rows, episodes, config, device, held)
    shifted = augmented(source, episodes.spec, config.data.random_shift)
    index = (held.repeat_interleave(episodes.length) & own).nonzero().flatten()
    held_out = HeldOut(rows, index, episodes.spec.act.names) if len(index) else None
    return OfflineLoop(learner, shifted, metrics_of(source, held), held_out)
