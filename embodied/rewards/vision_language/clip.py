"""Rewards from frozen image-text encoders: similarity to a sentence, distance to a goal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Count, Fraction, NonNegative, Number, Positive, Whole
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
from embodied.vision.simclip import BLANK, SimClip

Sentences = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ClipConfig:
    """Settings of the CLIP reward. Several sentences of `prompt` or `baseline` are averaged.

    `ladder` "auto" is the order that the encoder was trained with, if one ends in the prompt (for
    "A and B" the mean of both). `value` "level" is score - 1 in each step: reaching the goal soon
    and staying is optimal; "change" is discount * score' - score, potential-based shaping.
    `terminations` "as_truncations" cannot let the environment's success leak into the reward.
    """

    prompt: Sentences = None  # describes the goal; null: the environment's text
    baseline: Sentences = None  # describes a scene without the goal
    model: str = "simclip"  # "simclip", a folder with a CLIP or SigLIP, or a name on the hub
    alpha: Fraction = 0.5  # weight of the direction from baseline to goal
    ladder: Literal["auto", "none"] | tuple[str, ...] = "auto"  # or sentences from worst to best
    temperature: Positive | None = None  # softmax over the ladder; null: the encoder's
    value: Literal["level", "change"] = "level"  # form of the reward
    scale: Number = 1.0  # multiplies the reward
    picture: str | None = None  # image observation; null: the environment is rendered
    size: Count | None = None  # side of rendered images, pixels; null: the encoder's
    terminations: Literal["as_truncations", "kept"] = "as_truncations"  # what they become


class Clip(Reward):
    """Similarity of rendered images to a sentence: VLM-RM (Rocamonde et al., 2024). Applied once.

    With the image's unit embedding z, the mean embeddings g and b of the goal's and the baseline's
    sentences, and d = g - b:

        P = alpha d d^T / |d|^2 + (1 - alpha) I,    r = 1 - |P (z - g)|^2 / 2

    (alpha 0: cosine similarity; alpha 1: only the direction from baseline to goal counts). Or, with
    sentences y_0..y_K from worst to best (given, or known to the encoder), the ladder

        r = sum_k softmax_k(t <z, y_k>) k / K

    which, unlike a similarity, is ordered between its ends.
    """

    frozen = True

    def __init__(self, config: ClipConfig, spec: Spec, device: torch.device) -> None:
        self.config = config
        require_picture(config.picture, spec)
        goal = listed(config.prompt) or listed(spec.text or None)
        if not goal and not isinstance(config.ladder, tuple):
            raise ConfigError('no goal: set reward.prompt="..."')
        self.model = open_image_text(config.model, device)
        self.readout = readout_of(config, self.model, goal)

    def augment_env(self, env: VecEnv) -> VecEnv:
        config = self.config
        if config.picture is None:
            env = with_render(env, config.size or self.model.side)
        return NoTerminationWrapper(env) if config.terminations == "as_truncations" else env

    def score(self, pictures: Tensor) -> Tensor:
        """Similarity [N] of uint8 images [N, H, W, 3] to the prompt; at most 1."""
        return self.readout(self.model.images(pictures))

    def __call__(self, transitions: Tensors) -> Tensor:
        leaf, config = self.config.picture or PICTURE, self.config
        after = self.score(images_of(transitions, f"next_obs/{leaf}"))
        if config.value == "level":
            reward = after - 1
        else:
            before = self.score(images_of(transitions, f"obs/{leaf}"))
            reward = transitions["discount"].to(after.device) * after - before
        return (config.scale * reward).to(transitions["reward"].device)


class Projected:
    """1 - |P (z - g)|^2 / 2 of embeddings [N, D]."""

    def __init__(self, goal: Tensor, baseline: Tensor | None, alpha: float) -> None:
        self.goal = goal
        self.alpha = alpha if baseline is not None else 0.0
        way = torch.zeros_like(goal) if baseline is None else goal - baseline
        if self.alpha and float(way.norm()) < 1e-6:
            raise ConfigError("reward.baseline has the same embedding as reward.prompt")
        self.way = way / way.norm().clamp(min=1e-12)

    def __call__(self, seen: Tensor) -> Tensor:
        off = seen - self.goal
        along = (off @ self.way)[:, None] * self.way
        return 1 - 0.5 * (self.alpha * along + (1 - self.alpha) * off).square().sum(1)


class Ladders:
    """Expected positions in [0, 1] on ladders, each [K, D] from worst to best, averaged."""

    def __init__(self, ladders: list[Tensor], scale: float) -> None:
        self.ladders = ladders
        self.scale = scale

    def __call__(self, seen: Tensor) -> Tensor:
        return torch.stack([self.place(seen, rungs) for rungs in self.ladders]).mean(0)

    def place(self, seen: Tensor, rungs: Tensor) -> Tensor:
        steps = torch.linspace(0, 1, len(rungs), device=seen.device)
        return (self.scale * seen @ rungs.T).softmax(1) @ steps


def readout_of(config: ClipConfig, model: ImageText, goal: tuple[str, ...]) -> Projected | Ladders:
    """The ladder that is configured or provided by the encoder, else goal and baseline."""
    scale = getattr(model, "scale", 100.0) if not config.temperature else 1 / config.temperature
    if isinstance(config.ladder, tuple):
        if len(config.ladder) < 2:
            raise ConfigError("reward.ladder needs at least two sentences, from worst to best")
        return Ladders([model.texts(config.ladder)], scale)
    if config.ladder == "auto" and isinstance(model, SimClip) and config.baseline is None:
        if known := known_ladders(model, goal):
            return Ladders(
                [torch.stack([mean(model, rung) for rung in each]) for each in known], scale
            )
        baseline: tuple[str, ...] = (BLANK,)
    else:
        baseline = listed(config.baseline)
    away = model.texts(baseline).mean(0) if baseline else None
    return Projected(model.texts(goal).mean(0), away, config.alpha)


def known_ladders(model: SimClip, goal: tuple[str, ...]) -> list[list[list[str]]]:
    """The encoder's ladders that end in each sentence, or in all its parts ("A and B"); [] if a
    sentence has none."""
    found: dict[str, list[list[str]]] = {}
    for sentence in goal:
        parts = [part for part in re.split(r"\band\b|,|;", sentence) if part.strip()]
        ladders = [model.ladder(part) for part in parts]
        if None in ladders:
            ladders = [model.ladder(sentence)]
        for each in ladders:
            if each is None:
                return []
            found[each[-1][0]] = each
    return list(found.values())


def mean(model: ImageText, sentences: list[str]) -> Tensor:
    """Mean embedding of several sentences, a unit vector [D]."""
    return functional.normalize(model.texts(sentences).mean(0), dim=0)


def listed(sentences: Sentences) -> tuple[str, ...]:
    return () if sentences is None else (sentences,) if isinstance(sentences, str) else sentences


def require_picture(name: str | None, spec: Spec) -> None:
    """ConfigError if `name` is not an image observation."""
    if name is not None and (name not in spec.obs or not spec.obs[name].is_image):
        images = [leaf for leaf, about in spec.obs.items() if about.is_image]
        raise ConfigError(f"reward.picture={name} is not an image observation; there are {images}")


def images_of(transitions: Tensors, key: str) -> Tensor:
    """The images in `transitions`; ConfigError if there are none."""
    if key not in transitions:
        raise ConfigError(f"the transitions have no {key}: choose an image, reward.picture=NAME")
    return transitions[key]


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
