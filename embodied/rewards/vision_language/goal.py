"""Goal reward: negative distance to a goal, an image or a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import Count, NonNegative, Number, Whole
from embodied.core.build import ConfigError, nearest
from embodied.core.env import VecEnv
from embodied.core.reward import Reward
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import DatasetError, read_episodes
from embodied.datasets.lerobot.video import decode_image
from embodied.rewards.wrappers.added_observations import PICTURE, with_render
from embodied.rewards.wrappers.success_detector import NoTerminationWrapper
from embodied.vision.contrastive import open_image_text
from embodied.vision.image_text import ImageText


@dataclass(frozen=True)
class GoalConfig:
    """Settings of the goal reward: either `goal` or `state` is given."""

    goal: str | None = None  # image file, or dataset whose `episode` ends in the goal
    state: dict[str, Number] | None = None  # target values of named elements; others do not count
    leaf: str | None = None  # observation to compare; null: rendered, and `goal` is an image file
    episode: Whole = -1  # episode of the dataset `goal`; -1: the last
    weights: dict[str, NonNegative] = field(default_factory=dict)  # of elements by name; default 1
    model: str = "simclip"  # "simclip", a folder with a CLIP or SigLIP, or a name on the hub
    scale: Number = 1.0  # multiplies the reward
    size: Count | None = None  # side of rendered images, pixels; null: the encoder's
    terminations: Literal["as_truncations", "kept"] = "as_truncations"  # what they become


class Goal(Reward):
    """Negative distance to a goal given as an image or a state; applied once.

    Images are compared by an image-text encoder, r = -s |z - z_goal| with unit embeddings z; states
    by a weighted distance, r = -s |w (x - x_goal)|.
    """

    frozen = True

    def __init__(self, config: GoalConfig, spec: Spec, device: torch.device) -> None:
        self.config = config
        self.leaf = PICTURE if config.leaf is None else config.leaf
        if config.leaf is not None and config.leaf not in spec.obs:
            raise ConfigError(
                f"reward.leaf={config.leaf} is not an observation: {', '.join(spec.obs)}"
            )
        if (config.goal is None) == (config.state is None):
            raise ConfigError("no goal: set reward.goal=PATH or reward.state={NAME: NUMBER}")
        self.model: ImageText | None = None
        if config.leaf is None or spec.obs[config.leaf].is_image:
            if config.goal is None:
                raise ConfigError("reward.state needs a vector observation: reward.leaf=state")
            self.model = open_image_text(config.model, device)
            self.goal = self.model.images(goal_image(config, config.goal)[None])
            return
        names = names_of(spec.obs[config.leaf])
        if config.goal is None:
            wanted, every = vector(config.state or {}, names, 0.0), config.state or {}
        else:
            wanted, every = goal_image(config, config.goal).float().flatten(), names
        if len(wanted) != len(names):
            raise ConfigError(f"the goal has {len(wanted)} numbers, {config.leaf} has {len(names)}")
        counts = torch.tensor([name in every for name in names])
        self.goal = wanted.to(device)
        self.weights = torch.where(counts, vector(config.weights, names, 1.0), 0.0).to(device)

    def augment_env(self, env: VecEnv) -> VecEnv:
        if self.config.leaf is None and self.model is not None:
            env = with_render(env, self.config.size or self.model.side)
        return NoTerminationWrapper(env) if self.config.terminations == "as_truncations" else env

    def __call__(self, transitions: Tensors) -> Tensor:
        key = f"next_obs/{self.leaf}"
        if key not in transitions:
            raise ConfigError(
                f"the transitions have no {key}: choose an observation, reward.leaf=NAME"
            )
        if self.model is not None:
            off = self.model.images(transitions[key]) - self.goal
        else:
            off = self.weights * (transitions[key].flatten(1) - self.goal)
        return (-self.config.scale * off.norm(dim=1)).to(transitions["reward"].device)


def goal_image(config: GoalConfig, goal: str) -> Tensor:
    """The goal: an image [H, W, 3] or an observation; ConfigError if it cannot be read."""
    path = Path(goal).expanduser()
    if path.is_file():
        try:
            picture = decode_image(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"reward.goal={path} is not an image") from error
        if picture.dtype != torch.uint8:
            raise ConfigError(f"reward.goal={path} has 16 bits a colour: save it with 8")
        return picture[..., :3] if picture.shape[-1] >= 3 else picture[..., :1].expand(-1, -1, 3)
    if not path.is_dir():
        raise ConfigError(f"reward.goal={path} is neither an image nor a dataset")
    if config.leaf is None:
        raise ConfigError(
            "a goal from a dataset needs the observation to compare: reward.leaf=NAME"
        )
    try:
        episodes = read_episodes(path)
    except DatasetError as error:
        raise ConfigError(f"reward.goal={path}: {error}") from error
    if config.leaf not in episodes.final:
        raise ConfigError(f"{path} has no {config.leaf}; it has {', '.join(episodes.final)}")
    if not -len(episodes) <= config.episode < len(episodes):
        raise ConfigError(f"reward.episode={config.episode}: {path} has {len(episodes)} episodes")
    return episodes.final[config.leaf][config.episode]


def names_of(leaf: Leaf) -> tuple[str, ...]:
    """A name for each element of the flattened observation."""
    return leaf.names if leaf.names else tuple(str(number) for number in range(leaf.size))


def vector(given: Mapping[str, float], names: tuple[str, ...], rest: float) -> Tensor:
    """`given` in the order of `names`, `rest` elsewhere; ConfigError for an unknown name."""
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"no element {unknown[0]!r}{nearest(unknown[0], names)}")
    return torch.tensor([given.get(name, rest) for name in names])
