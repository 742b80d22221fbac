"""CLIP reward: similarity of images to a sentence, by a frozen image-text encoder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Count, Fraction, Number, Positive
from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.reward import Reward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.wrappers.added_observations import PICTURE, with_render
from embodied.rewards.wrappers.success_detector import NoTerminationWrapper
from embodied.vision.contrastive import open_image_text
from embodied.vision.image_text import ImageText
from embodied.vision.simclip import BLANK, SimClip

Sentences = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Config:
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

    def __init__(self, config: Config, spec: Spec, device: torch.device) -> None:
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


def readout_of(config: Config, model: ImageText, goal: tuple[str, ...]) -> Projected | Ladders:
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
