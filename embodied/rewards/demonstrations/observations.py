"""Dataset observations for rewards learned from demonstrations or labelled episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from embodied.buffers.augment import random_shift
from embodied.core import distributed
from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.rewards.wrappers.render_caption import PICTURE

Folders = str | Sequence[str] | None


def read_demonstrations(
    demos: Folders, limit: int | None, others: Folders, other_limit: int | None
) -> tuple[list[Episodes], list[Episodes]]:
    """`limit` episodes (None: all) of each dataset of `demos`, and `other_limit` of `others`.

    ConfigError without demonstrations, for an episode of one step, and with several processes.
    """
    if distributed.world() > 1:
        raise ConfigError("with several processes each would fit its own reward; train in one")
    if not demos:
        raise ConfigError(
            "this reward is learned from demonstrations: reward.demos=DIR "
            "(embodied demos collect env=... episodes=10 out=DIR)"
        )
    won, rest = _read(demos, limit), _read(others, other_limit)
    if min(int(part.length.min()) for part in won + rest) < 2:
        raise ConfigError("demonstrations need at least two steps")
    return won, rest


def _read(folders: Folders, limit: int | None) -> list[Episodes]:
    paths = [folders] if isinstance(folders, str) else folders or ()
    return [read_episodes(Path(path), limit=limit) for path in paths]


def shared_leaves(views: Sequence[str], specs: Sequence[Spec]) -> dict[str, Leaf]:
    """The observations `views` of several datasets; ConfigError if one is missing or differs in
    shape."""
    if not views:
        raise ConfigError("reward.views is empty: name at least one observation")
    leaves: dict[str, Leaf] = {}
    for name in views:
        for spec in specs:
            if name not in spec.obs:
                rendered = ": collect it in an environment that renders it (env=fr3_lift_pictured)"
                hint = rendered if name == PICTURE else nearest(name, spec.obs)
                raise ConfigError(f"reward.views: the dataset has no observation {name}{hint}")
            leaf = leaves.setdefault(name, spec.obs[name])
            _require_same(name, spec.obs[name], leaf, "one dataset", "another")
    return leaves


def require_observed(leaves: Mapping[str, Leaf], spec: Spec) -> None:
    """ConfigError if an environment lacks the observations `leaves`; images can be rendered."""
    for name, leaf in leaves.items():
        if name in spec.obs:
            _require_same(name, spec.obs[name], leaf, "the environment", "the dataset")
        elif name != PICTURE:
            raise ConfigError(
                f"reward.views: the environment has no observation {name}{nearest(name, spec.obs)}"
            )


def require_recorded(leaves: Mapping[str, Leaf], obs: Tensors) -> None:
    """ConfigError if the observations of a recorded episode lack one of `leaves`."""
    for name in leaves:
        if name not in obs:
            raise ConfigError(
                f"the episodes have no observation {name}, which the reward was learned from"
                f"{nearest(name, obs)}"
            )


def all_frames(episodes: Episodes, leaves: Mapping[str, Leaf]) -> tuple[Tensors, Tensor]:
    """Every observation of every episode, the final one included: leaves [N, ...], and the episode
    [N] of each frame."""
    episode = torch.repeat_interleave(torch.arange(len(episodes)), episodes.length + 1)
    start = (episodes.length + 1).cumsum(0) - (episodes.length + 1)
    place = torch.arange(len(episode)) - start[episode]
    final = len(episodes.steps["action"]) + episode
    at = torch.where(place < episodes.length[episode], episodes.start[episode] + place, final)
    seen = {
        name: torch.cat([episodes.steps[f"obs/{name}"], episodes.final[name]])[at]
        for name in leaves
    }
    return seen, episode


def shift_images(moments: Tensors, most: int, random: torch.Generator) -> Tensors:
    """Images [N, H, W, C] shifted randomly by up to `most` pixels; other observations unchanged."""
    return {
        k: random_shift(v, most, random) if most and v.dtype == torch.uint8 and v.ndim == 4 else v
        for k, v in moments.items()
    }


def _require_same(name: str, here: Leaf, there: Leaf, one: str, other: str) -> None:
    if (here.shape, here.dtype) != (there.shape, there.dtype):
        raise ConfigError(
            f"reward.views: {name} is {here.dtype}{list(here.shape)} in {one} and "
            f"{there.dtype}{list(there.shape)} in {other}"
        )
