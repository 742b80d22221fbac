"""Offline training: every update samples from a fixed dataset; no environment steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from embodied.buffers.source import Mixture, Source, augmented
from embodied.core.build import ConfigError
from embodied.evaluation.held_out import HeldOut, held_out_episodes
from embodied.learners.learner import Learner
from embodied.training.config import Offline
from embodied.training.demonstrations import imitated, metrics_of, pairs_of, rows_for, source_of
from embodied.training.trainer import RunParts, Trainer

if TYPE_CHECKING:
    from embodied.rewards.preferences.labellers import SegmentPairs


class OfflineLoop:
    """Runs updates from `source`; the steps of the run count updates. `pairs`: the labelled pairs
    of segments in `source`, if it samples pairs."""

    memory = ""

    def __init__(
        self,
        learner: Learner,
        source: Source,
        data_metrics: Mapping[str, float] | None = None,
        held_out: HeldOut | None = None,
        pairs: SegmentPairs | None = None,
    ) -> None:
        self.learner, self.source, self.pairs = learner, source, pairs
        self.held_out = held_out
        self.teacher = None
        self.dataset_metrics: Mapping[str, float] = data_metrics or {}
        self.rewards = None

    @property
    def data_metrics(self) -> Mapping[str, float]:
        """Metrics of the dataset; pairs are labelled now if they were not yet."""
        pairs = {} if self.pairs is None else self.pairs.metrics()
        return {**self.dataset_metrics, **pairs}

    def run(self, trainer: Trainer) -> None:
        while trainer.running:
            metrics = self.learner.update(self.source.sample(self.learner.batch_size))
            trainer.advance(1, metrics)

    def restart(self, seed: int) -> None:
        """Nothing: it steps no environment."""

    def get_state(self) -> dict[str, Any]:
        """The labels of pairs. There is nothing else: the dataset is read again, and sampling
        follows torch's generator."""
        return {} if self.pairs is None else {"pairs": self.pairs.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        if self.pairs is not None:
            self.pairs.set_state(state["pairs"])


def build_offline(parts: RunParts) -> OfflineLoop:
    """The loop over `episodes`; normalizers are fitted to them. Without an environment some
    episodes are held out, to evaluate on."""
    config, policy, learner, device = parts.config, parts.policy, parts.learner, parts.device
    episodes = parts.episodes
    assert isinstance(config.data, Offline)
    if episodes is None:
        raise ConfigError(
            "offline training needs demonstrations: embodied demos collect env=... out=DIR, then "
            "demos=DIR"
        )
    rows = rows_for(episodes, policy, learner, config.execute)
    learner.fit(rows)
    if learner.rows == "pairs":
        pairs = pairs_of(rows, episodes, learner, config, device)
        source = augmented(pairs, episodes.spec, config.data.random_shift)
        return OfflineLoop(learner, source, pairs=pairs)
    if config.data.pairs is not None:
        raise ConfigError("data.pairs has no effect: this learner does not learn from pairs")
    share = 0.0 if parts.env is not None else config.data.held_out
    own = imitated(rows)
    usable = torch.stack([part.any() for part in own.split(episodes.length.tolist())])
    held = held_out_episodes(usable, share)
    source = source_of(rows, episodes, config, device, learner.gamma, held)
    if isinstance(source, Mixture) and learner.batch_size % source.period:
        raise ConfigError(
            f"learner.batch_size={learner.batch_size} should be a multiple of {source.period}, to "
            "have exactly data.fractions of each dataset"
        )
    shifted = augmented(source, episodes.spec, config.data.random_shift)
    index = (held.repeat_interleave(episodes.length) & own).nonzero().flatten()
    held_out = HeldOut(rows, index, episodes.spec.act.names) if len(index) else None
    return OfflineLoop(learner, shifted, metrics_of(source, episodes, held), held_out)
