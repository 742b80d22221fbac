"""Goal: how near a row is to a goal that was shown, as a picture or as a state.

Pictures are compared as an image-text encoder sees them, r = -s |z - z_goal| with unit vectors z;
states by their own numbers, r = -s |w (x - x_goal)|.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from embodied.core.build import ConfigError, nearest
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import DatasetError, read_episodes
from embodied.datasets.lerobot.video import decode_image
from embodied.rewards.wrappers.no_termination import NoTerminationWrapper
from embodied.rewards.wrappers.render_caption import PICTURE, with_render
from embodied.vision.contrastive import open_image_text
from embodied.vision.image_text import ImageText


@dataclass(frozen=True)
class Config:
    """`goal`: an image file, or a folder of recorded episodes, of which the last observation of
    number `episode` is the goal (-1: the last one). `leaf`: which observation to compare; None
    draws the world at `size` pixels (None: the model's own), and the goal is an image file.

    `state`, instead of `goal`: what named elements of a vector (by number, where they have no
    names) should be; the others do not count. `weights` of its elements, 1 where not named.
    `model` as in the reward clip; `ends` "hidden" keeps the learner from knowing of any end of an
    episode but the time limit.
    """

    goal: str | None = None
    state: dict[str, float] | None = None
    leaf: str | None = None
    episode: int = -1
    weights: dict[str, float] = field(default_factory=dict)
    model: str = "simclip"
    scale: float = 1.0
    size: int | None = None
    ends: Literal["hidden", "told"] = "hidden"


class Goal:
    """Asked once for every row, when it is stored; nothing is learned."""

    frozen = True

    def __init__(self, config: Config, spec: Spec, device: torch.device) -> None:
        self.config, self.leaf = config, PICTURE if config.leaf is None else config.leaf
        if config.leaf is not None and config.leaf not in spec.obs:
            raise ConfigError(f"reward.leaf={config.leaf}: there are {', '.join(spec.obs)}")
        if (config.goal is None) == (config.state is None):
            raise ConfigError("what is the goal? reward.goal=PATH, or reward.state={NAME: NUMBER}")
        self.model: ImageText | None = None
        if config.leaf is None or spec.obs[config.leaf].is_image:
            if config.goal is None:
                raise ConfigError("reward.state is of a vector: reward.leaf=state")
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
        weights = vector(config.weights, names, 1.0)
        counts = torch.tensor([name in every for name in names])
        self.goal, self.weights = wanted.to(device), torch.where(counts, weights, 0.0).to(device)

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The world with its picture where one is needed, and without its ends."""
        if self.config.leaf is None and self.model is not None:
            env = with_render(env, self.config.size or self.model.side)
        return NoTerminationWrapper(env) if self.config.ends == "hidden" else env

    def __call__(self, rows: Tensors) -> Tensor:
        key = f"next_obs/{self.leaf}"
        if key not in rows:
            raise ConfigError(f"the rows hold no {key}: name what to compare, reward.leaf=LEAF")
        if self.model is not None:
            off = self.model.images(rows[key]) - self.goal
        else:
            off = self.weights * (rows[key].flatten(1) - self.goal)
        return (-self.config.scale * off.norm(dim=1)).to(rows["reward"].device)

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """There is nothing to learn."""
        return {}


def goal_image(config: Config, goal: str) -> Tensor:
    """What was shown: a picture [H, W, 3] or an observation; ConfigError where there is none."""
    path = Path(goal).expanduser()
    if path.is_file():
        try:
            picture = decode_image(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"reward.goal={path} is not an image") from error
        return picture[..., :3] if picture.shape[-1] >= 3 else picture[..., :1].expand(-1, -1, 3)
    if not path.is_dir():
        raise ConfigError(f"reward.goal={path} is neither an image nor a folder of episodes")
    if config.leaf is None:
        raise ConfigError("a goal from episodes needs the observation to compare: reward.leaf=LEAF")
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
    """A name for each element of the flattened leaf."""
    return leaf.names if leaf.names else tuple(str(number) for number in range(leaf.size))


def vector(given: Mapping[str, float], names: tuple[str, ...], rest: float) -> Tensor:
    """`given` in the order of `names`, `rest` where nothing is given; ConfigError for a name that
    is none."""
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"there is no element {unknown[0]!r}{nearest(unknown[0], names)}")
    return torch.tensor([given.get(name, rest) for name in names])
