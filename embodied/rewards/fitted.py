"""Rewards with a model that is fitted to recorded episodes, and its file and card in a folder.

The card is a JSON file beside the weights. It holds the fingerprint of everything that the fit
depends on, so that the same model is not fitted twice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodied.buffers.source import random_shift
from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, nearest
from embodied.core.env import VecEnv
from embodied.core.files import read_json
from embodied.core.reward import SummedReward
from embodied.core.saved_file import load_tensors
from embodied.core.spec import Leaf, Spec, in_another_order
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.datasets.transitions import joined
from embodied.rewards.wrappers.added_observations import PICTURE, with_pictures

Folders = str | Sequence[str] | None
Shaping = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPINGS: dict[str, Shaping] = {
    "potential": lambda before, after, discount: discount * after - before,
    "gain": lambda before, after, discount: after - before,
    "level": lambda before, after, discount: after - 1,
}
"""The reward [N] for the progress before and after a transition, and its discount.

potential  gamma^k Phi(s') - Phi(s): potential-based shaping
gain       Phi(s') - Phi(s), also at a termination: changes the optimal policy. Standing still costs
           nothing (with a potential it does), and progress is rewarded even if success is never
           reached, which exploration from scratch needs: a potential gives all policies without
           success the same return
level      Phi(s') - 1: at most 0, so that reaching the goal soon is optimal, and staying near it is
           not worth more than ending the episode there
"""


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


def _require_same(name: str, here: Leaf, there: Leaf, one: str, other: str) -> None:
    if (here.shape, here.dtype) != (there.shape, there.dtype):
        raise ConfigError(
            f"reward.views: {name} is {here.dtype}{list(here.shape)} in {one} and "
            f"{there.dtype}{list(there.shape)} in {other}"
        )
    if in_another_order(here, there):
        raise ConfigError(
            f"reward.views: {name} has its elements in another order in {one}, {list(here.names)}, "
            f"than in {other}, {list(there.names)}"
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


@dataclass(frozen=True)
class Frames:
    """Frames of several episodes, concatenated: `episode` [N] (int64), `place` [N] in [0, 1]
    (relative time in the episode), `progress` [N] (0 throughout in failed episodes)."""

    episode: Tensor
    place: Tensor
    progress: Tensor

    def __len__(self) -> int:
        return len(self.episode)

    def followed_by(self, other: Frames) -> Frames:
        """These frames, then those of further episodes."""
        count = int(self.episode.max()) + 1
        return Frames(
            torch.cat([self.episode, other.episode + count]),
            torch.cat([self.place, other.place]),
            torch.cat([self.progress, other.progress]),
        )


def linear_progress(length: Tensor, succeeds: bool = True) -> Frames:
    """Linear progress i / (M - 1) over episodes of `length` [E] frames, at least 2 each; 0
    throughout unless they succeed."""
    episode = torch.repeat_interleave(torch.arange(len(length)), length)
    start = (length.cumsum(0) - length)[episode]
    place = (torch.arange(len(episode)) - start) / (length[episode] - 1)
    return Frames(episode, place, place if succeeds else torch.zeros_like(place))


def fingerprint(settings: Any, seed: int, data: Iterable[Tensor]) -> str:
    """Hash of everything that a fit depends on; `settings` are a dataclass."""
    digest = hashlib.sha256(json.dumps([asdict(settings), seed]).encode())
    for value in data:
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_fitted(module: nn.Module, weights: Path, card: Path, facts: dict[str, Any]) -> None:
    """Write weights and card; the card last, so that a folder with a card is complete."""
    weights.parent.mkdir(parents=True, exist_ok=True)
    card.unlink(missing_ok=True)
    save_file({k: v.cpu().contiguous() for k, v in module.state_dict().items()}, weights)
    card.write_text(json.dumps(facts, indent=1))


class FittedReward(nn.Module, SummedReward):
    """Reward from the progress that a model predicts, fitted to demonstrations and other episodes.

    The model is stored in the run's `folder`; built again with the same settings and episodes, it
    is loaded instead of fitted. A subclass sets `name` and `measure`, and fits in `fit_model`.
    """

    frozen = True
    name: ClassVar[str]
    """Name of the model's files, and in messages."""
    measure: ClassVar[str]
    """What the error of the fit is of."""
    leaves: dict[str, Leaf]
    evidence: Sequence[Tensor] = ()
    """What the fit depends on besides the frames."""
    found: Mapping[str, float] = {}
    """What the fit says of itself, for the card."""
    __call__ = SummedReward.__call__  # not that of modules

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__()
        self.config = config
        self.seed = seed

    def read(
        self, spec: Spec, others: Folders, other_limit: int | None
    ) -> tuple[Episodes, Episodes | None]:
        """The demonstrations and the other episodes, of each dataset at most `other_limit` (None:
        all); sets `leaves`, the observations in use."""
        if distributed.world() > 1:
            raise ConfigError("with several processes each would fit its own reward; train in one")
        if not self.config.demos:
            raise ConfigError(
                "this reward is learned from demonstrations: reward.demos=DIR "
                "(embodied demos collect env=... episodes=10 out=DIR)"
            )
        shown = _read(self.config.demos, self.config.demo_episodes)
        rest = _read(others, other_limit)
        if min(int(part.length.min()) for part in shown + rest) < 2:
            raise ConfigError("demonstrations need at least two steps")
        self.leaves = shared_leaves(self.config.views, [part.spec for part in shown + rest])
        require_observed(self.leaves, spec)
        return joined(shown), joined(rest) if rest else None

    def fit_model(self, moments: Tensors, frames: Frames, shown: int) -> float:
        """Fit the model to all frames (leaves [N, ...]), of which the first `shown` episodes are
        demonstrations. Returns the mean squared error."""
        raise NotImplementedError(f"{type(self).__name__} has no model to fit")

    def fit_once(
        self, shown: Episodes, rest: Episodes | None, folder: Path | None, device: torch.device
    ) -> None:
        """Load the model from `folder` if it was fitted to the same data, else fit and store it
        (None: it is not stored)."""
        moments, _ = all_frames(shown, self.leaves)
        frames = linear_progress(shown.length + 1)
        if rest is not None:
            moments = tt.cat([moments, all_frames(rest, self.leaves)[0]])
            frames = frames.followed_by(linear_progress(rest.length + 1, succeeds=False))
        mark = fingerprint(
            self.config, self.seed, [*moments.values(), frames.progress, *self.evidence]
        )
        files = known = None
        if folder is not None:
            files = (folder / f"{self.name}.safetensors", folder / f"{self.name}.json")
            known = read_json(files[1])["fingerprint"] if files[1].exists() else None
        if files is not None and known == mark:
            self.load_state_dict(load_tensors(files[0]))
        else:
            error = self.fit_model(moments, frames, len(shown))
            print(
                f"{self.name}: fitted to {len(shown)} demonstrations, "
                f"RMSE of {self.measure} {math.sqrt(error):.3f}"
            )
            facts = {
                "version": 1,
                "fingerprint": mark,
                "demonstrations": len(shown),
                "others": 0 if rest is None else len(rest),
                "frames": len(frames),
                "error": error,
                **self.found,
                "config": asdict(self.config),
            }
            if files is not None:
                save_fitted(self, *files, facts)
        self.to(device).eval().requires_grad_(False)

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with rendered images, if they are needed and not observed."""
        return with_pictures(env, self.leaves)

    def get_state(self) -> dict[str, Any]:
        return {"module": self.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state["module"])


def _read(folders: Folders, limit: int | None) -> list[Episodes]:
    paths = [folders] if isinstance(folders, str) else folders or ()
    return [read_episodes(Path(path), limit=limit) for path in paths]
