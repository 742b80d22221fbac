"""Success labels: which frames of labelled episodes show success, for training a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Bound, Count, CountOrZero, Fraction, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.nn.fit import held_out
from embodied.rewards.demonstrations.observations import all_frames, shared_leaves


@dataclass(frozen=True)
class Training:
    """Settings of the classifier's network, labels, training and calibration. Frames before the
    `margin` are negatives."""

    views: tuple[str, ...] = ("state",)  # observations to use
    model: str | None = None  # frozen encoder of images: "simclip", a folder, hub name; null: a CNN
    hidden: tuple[Count, ...] = (64, 64)  # units of the hidden layers
    channels: tuple[Count, ...] = (16, 32, 32)  # channels of the CNN
    updates: Count = 600  # gradient steps of the first version
    batch_size: Annotated[int, Bound(2)] = 64  # frames per gradient step, half of them positives
    lr: Positive = 1e-3  # AdamW's learning rate
    shift: CountOrZero = 2  # largest shift of images, pixels
    last: Count = 1  # last frames of a successful episode that are positives
    margin: CountOrZero = 1  # frames before these that are skipped
    held_out: Fraction = 0.25  # fraction of episodes for calibration; at least one of each kind
    false_positives: Fraction = 0.01  # fraction of negatives that may exceed the threshold
    shuffle: bool = False  # permute the labels: a control experiment


@dataclass(frozen=True)
class LabelledFrames:
    """Frames (leaves [N, ...]), `label` [N] (float, 1: success) and `episode` [N] (int64)."""

    moments: Tensors
    label: Tensor
    episode: Tensor

    def at(self, index: Tensor) -> LabelledFrames:
        return LabelledFrames(tt.take(self.moments, index), self.label[index], self.episode[index])


def load_labelled(
    folders: Sequence[str], how: Training, seed: int
) -> tuple[LabelledFrames, dict[str, Leaf]]:
    """The labelled frames of datasets, and the specs of their observations."""
    parts = [read_episodes(Path(folder)) for folder in folders]
    leaves = shared_leaves(how.views, [part.spec for part in parts])
    made, count = [], 0
    for folder, part in zip(folders, parts, strict=True):
        made.append(_labels(part, folder, leaves, how, count))
        count += len(part)
    whole = LabelledFrames(
        tt.cat([one.moments for one in made]),
        torch.cat([one.label for one in made]),
        torch.cat([one.episode for one in made]),
    )
    if how.shuffle:
        order = torch.randperm(len(whole.label), generator=torch.Generator().manual_seed(seed))
        whole = replace(whole, label=whole.label[order])
    return whole, leaves


def _labels(
    episodes: Episodes, folder: str, leaves: Mapping[str, Leaf], how: Training, first: int
) -> LabelledFrames:
    if "success" not in episodes.steps:
        raise ConfigError(f"{folder} has no column `success` that labels successful episodes")
    moments, episode = all_frames(episodes, leaves)
    ends = episodes.start + episodes.length - 1
    won = episodes.steps["success"][ends].bool()
    length = episodes.length + 1
    left = (length.cumsum(0) - 1)[episode] - torch.arange(len(episode))  # 0: the last frame
    success = won[episode] & (left < how.last)
    kept = (success | ~won[episode] | (left >= how.last + how.margin)).nonzero().flatten()
    return LabelledFrames(moments, success.float(), episode + first).at(kept)


def with_successes(whole: LabelledFrames, moments: Tensors) -> LabelledFrames:
    """`whole` plus the positives `moments` (leaves [M, ...]; {}: none), each as an episode of its
    own."""
    if not moments:
        return whole
    count = tt.length(moments)
    return LabelledFrames(
        tt.cat([whole.moments, moments]),
        torch.cat([whole.label, torch.ones(count)]),
        torch.cat([whole.episode, int(whole.episode.max()) + 1 + torch.arange(count)]),
    )


def split(whole: LabelledFrames, share: float, seed: int) -> tuple[LabelledFrames, LabelledFrames]:
    """Training and held-out frames, split by episode; both contain successes."""
    won = torch.unique(whole.episode[whole.label > 0])
    every = torch.unique(whole.episode)
    others = every[~torch.isin(every, won)]
    if len(won) < 2:
        raise ConfigError(
            f"{len(won)} successful episodes are too few to train and to calibrate: "
            "at least 2 are needed"
        )
    random = torch.Generator().manual_seed(seed)
    held = torch.cat([part[held_out(len(part), share, random)] for part in (won, others)])
    aside = torch.isin(whole.episode, held)
    return whole.at((~aside).nonzero().flatten()), whole.at(aside.nonzero().flatten())
