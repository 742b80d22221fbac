"""What rewards learned from datasets look at: leaves, and every moment of every episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from embodied.buffers.augment import random_shift
from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.rewards.wrappers.render_caption import PICTURE


def shared_leaves(views: Sequence[str], specs: Sequence[Spec]) -> dict[str, Leaf]:
    """The leaves `views` of datasets; ConfigError where one is missing or of two shapes."""
    if not views:
        raise ConfigError("reward.views names nothing to look at")
    leaves: dict[str, Leaf] = {}
    for name in views:
        for spec in specs:
            if name not in spec.obs:
                raise ConfigError(
                    f"reward.views: the dataset does not show {name}{_more(name, spec)}"
                )
            leaf = leaves.setdefault(name, spec.obs[name])
            _require_alike(name, spec.obs[name], leaf, "one dataset", "another")
    return leaves


def require_observed(leaves: Mapping[str, Leaf], spec: Spec) -> None:
    """ConfigError where a world does not show `leaves`; pictures of it can be watched."""
    for name, leaf in leaves.items():
        if name in spec.obs:
            _require_alike(name, spec.obs[name], leaf, "this world", "the dataset")
        elif name != PICTURE:
            raise ConfigError(
                f"reward.views: this world does not show {name}{nearest(name, spec.obs)}"
            )


def all_frames(episodes: Episodes, leaves: Mapping[str, Leaf]) -> tuple[Tensors, Tensor]:
    """Every observation, the one after the last action included: leaves [N, ...] and the episode
    [N] of each."""
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
    """Every picture [N, H, W, C] moved by up to `most` pixels."""
    return {
        k: random_shift(v, most, random) if most and v.dtype == torch.uint8 and v.ndim == 4 else v
        for k, v in moments.items()
    }


def _more(name: str, spec: Spec) -> str:
    if name == PICTURE:
        return ": collect it in a world with reward pictures (env=fr3_lift_pictured)"
    return nearest(name, spec.obs)


def _require_alike(name: str, here: Leaf, there: Leaf, one: str, other: str) -> None:
    if (here.shape, here.dtype) != (there.shape, there.dtype):
        raise ConfigError(
            f"reward.views: {name} is {here.dtype}{list(here.shape)} in {one} and "
            f"{there.dtype}{list(there.shape)} in {other}"
        )
