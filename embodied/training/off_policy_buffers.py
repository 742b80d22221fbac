"""The buffers of off-policy training: replay, demonstrations and successful episodes, mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.source import Source
from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.reward import extra_columns
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner
from embodied.training.config import OffPolicy, RunConfig
from embodied.training.reward_pipeline import RewardPipeline

if TYPE_CHECKING:
    from embodied.buffers.success import SuccessBuffer
    from embodied.buffers.trajectory_columns import TrajectoryColumns
    from embodied.datasets.lerobot.reader import Episodes


@dataclass(frozen=True)
class Demonstrations:
    """`rows`: the transitions of `episodes`, with the columns of the replay buffer."""

    episodes: Episodes
    rows: Tensors


@dataclass(frozen=True)
class Buffers:
    """`source`: sampled by updates; `demos`: sampled by updates before the first environment step.

    `columns` completes transitions whose columns need the rest of their episode. `success` gets the
    transitions of successful episodes. `metrics`: metrics of the dataset.
    """

    replay: ReplayBuffer
    source: Source
    demos: Source
    columns: TrajectoryColumns | None = None
    success: SuccessBuffer | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def forget(self, env_ids: Tensor) -> None:
        """Drop what is held of the running episodes of parallel envs `env_ids` [n]."""
        for part in (self.columns, self.success):
            if part is not None:
                part.forget(env_ids)


def build_buffers(
    config: RunConfig,
    learner: Learner,
    rewards: RewardPipeline,
    demonstrations: Demonstrations | None,
    device: torch.device,
) -> Buffers:
    """The buffers; `demonstrations` are mixed into every batch or put into the replay buffer."""
    assert isinstance(config.data, OffPolicy)
    data = config.data
    replay, source, demos = _replay_and_demos(config, data, demonstrations, device)
    metrics: Mapping[str, float] = {}
    if demonstrations is not None:
        from embodied.training.demonstrations import metrics_of

        metrics = metrics_of(demos)
    success: SuccessBuffer | None = None
    if share := data.success_fraction:
        from embodied.buffers.mixture import Mixture
        from embodied.buffers.success import SuccessBuffer

        if learner.columns or learner.n_step > 1 or replay.columns:
            raise ConfigError(
                "data.success_fraction needs replay=uniform, learner.n_step=1 and a learner whose "
                "transitions do not depend on the rest of the episode: data.success_fraction=0"
            )
        success = SuccessBuffer(data.replay_size, replay, device)
        source = Mixture([source, success], (1 - share, share))
    source = rewards.sampled(source)
    demos = rewards.sampled(demos)
    if data.random_shift:  # after the rewards, which are computed from the images as they are
        from embodied.buffers.augment import augmented

        source = augmented(source, rewards.env.spec, data.random_shift)
        demos = augmented(demos, rewards.env.spec, data.random_shift)
    columns: TrajectoryColumns | None = None
    if learner.columns:
        from embodied.buffers.trajectory_columns import TrajectoryColumns

        columns = TrajectoryColumns(learner.columns)
    return Buffers(replay, source, demos, columns, success, metrics)


def _replay_and_demos(
    config: RunConfig,
    data: OffPolicy,
    demonstrations: Demonstrations | None,
    device: torch.device,
) -> tuple[ReplayBuffer, Source, Source]:
    """The replay buffer, and the sources of updates and of pretraining updates."""
    if demonstrations is None:
        replay = _new_replay(config, data.replay_size, device)
        return replay, replay, replay
    rows, share = demonstrations.rows, data.demo_fraction
    if share is None:
        replay = _new_replay(config, data.replay_size + tt.length(rows), device)
        replay.add(rows)
        return replay, replay, replay
    replay = _new_replay(config, data.replay_size, device)
    from embodied.buffers.mixture import Mixture
    from embodied.training.demonstrations import source_of

    demos = source_of(rows, demonstrations.episodes, config, device)
    if replay.columns:
        raise ConfigError(
            "this replay buffer cannot be mixed with demonstrations: data.demo_fraction=null"
        )
    return replay, Mixture([replay, demos], (1 - share, share)), demos


def _new_replay(config: RunConfig, capacity: int, device: torch.device) -> ReplayBuffer:
    rank = f"-{distributed.rank()}" if distributed.world() > 1 else ""
    return build(
        config.replay or {"_target_": "embodied.buffers.replay.ReplayBuffer"},
        ReplayBuffer,
        capacity=capacity,
        device=device,
        folder=Path(config.out) / f"replay{rank}",
    )


def require_usable(config: RunConfig, learner: Learner) -> None:
    """Raises ConfigError if a setting of `config.data` has no effect in this run."""
    assert isinstance(config.data, OffPolicy)
    data, demos = config.data, config.demos is not None
    if learner.rows == "chunks":
        raise ConfigError("this learner imitates action chunks; it cannot use a replay buffer")
    if learner.rows == "pairs" or "source" in extra_columns(learner):
        raise ConfigError(
            "this learner needs labelled pairs, or the number of each row's dataset, which only "
            "offline training has: data=offline"
        )
    if data.pretrain_steps and not demos:
        raise ConfigError("data.pretrain_steps are updates from demonstrations: demos=DIR")
    if not demos and data.demo_fraction != OffPolicy.demo_fraction:
        raise ConfigError("data.demo_fraction is the share of demonstrations: demos=DIR")
    if config.weighting is not None and data.demo_fraction is None:
        raise ConfigError(
            "weighting needs demonstrations in their own buffer: data.demo_fraction=0.5"
        )
    if data.normalize and not demos and not data.warmup_steps:
        raise ConfigError(
            "data.normalize fits normalizers to demonstrations or to the warm-up: demos=DIR or "
            "data.warmup_steps=1000"
        )
