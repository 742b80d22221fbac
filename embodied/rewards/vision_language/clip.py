"""Clip: a sentence is the reward, read off pictures by a frozen image-text encoder.

VLM-RM (Rocamonde et al., 2024). With unit vectors z of the picture, g and b the means of the goal's
and the baseline's sentences, d = g - b:

    P = alpha d d^T / |d|^2 + (1 - alpha) I,    r = 1 - |P (z - g)|^2 / 2

(alpha 0: the cosine; alpha 1: only the way from baseline to goal counts). Or, where sentences
y_0..y_K from worst to best are given or known to the model, the ladder

    r = sum_k softmax_k(t <z, y_k>) k / K

which, unlike a similarity, is ordered between its ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.wrappers.no_termination import NoTerminationWrapper
from embodied.rewards.wrappers.render_caption import PICTURE, with_render
from embodied.vision.contrastive import open_image_text
from embodied.vision.image_text import ImageText
from embodied.vision.simclip import BLANK, SimClip

Sentences = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Config:
    """`prompt` describes the goal (None: the world's own text), `baseline` a scene without it;
    several sentences each are averaged. `model`: "simclip", a folder with a CLIP or SigLIP, or a
    name on the hub.

    `ladder`: sentences from worst to best; "auto" takes the order that the model was taught, if one
    ends in what the prompt says (of a prompt "A and B", one for A and one for B, averaged); "none".
    `temperature` of the ladder (None: the model's own).

    `value`: "level" pays score - 1 in each step (being there is best, and being there soon);
    "change" pays discount * score' - score, potential-based shaping. Both are times `scale`.
    `picture`: an image among the observations to look at; None draws the world at `size` pixels
    (None: the model's own). `ends` "hidden" keeps the learner from knowing of any end of an episode
    but the time limit: the world's success is not to be had from there.
    """

    prompt: Sentences = None
    baseline: Sentences = None
    model: str = "simclip"
    alpha: float = 0.5
    ladder: Literal["auto", "none"] | tuple[str, ...] = "auto"
    temperature: float | None = None
    value: Literal["level", "change"] = "level"
    scale: float = 1.0
    picture: str | None = None
    size: int | None = None
    ends: Literal["hidden", "told"] = "hidden"


class Clip:
    """Asked once for every row, when it is stored; the encoder is never trained."""

    frozen = True

    def __init__(self, config: Config, spec: Spec, device: torch.device) -> None:
        self.config = config
        require_picture(config.picture, spec)
        if not 0 <= config.alpha <= 1:
            raise ConfigError(f"reward.alpha={config.alpha} should be between 0 and 1")
        goal = listed(config.prompt) or listed(spec.text or None)
        if not goal and not isinstance(config.ladder, tuple):
            raise ConfigError('what is the goal? reward.prompt="..."')
        self.model = open_image_text(config.model, device)
        self.readout = readout_of(config, self.model, goal)

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The world with its picture, and without its ends."""
        config = self.config
        if config.picture is None:
            env = with_render(env, config.size or self.model.side)
        return NoTerminationWrapper(env) if config.ends == "hidden" else env

    def score(self, pictures: Tensor) -> Tensor:
        """How much uint8 pictures [N, H, W, 3] are as the prompt says, [N]; at most 1."""
        return self.readout(self.model.images(pictures))

    def __call__(self, rows: Tensors) -> Tensor:
        leaf, config = self.config.picture or PICTURE, self.config
        after = self.score(images_of(rows, f"next_obs/{leaf}"))
        if config.value == "level":
            paid = after - 1
        else:
            before = self.score(images_of(rows, f"obs/{leaf}"))
            paid = rows["discount"].to(after.device) * after - before
        return (config.scale * paid).to(rows["reward"].device)

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """There is nothing to learn."""
        return {}


class Projected:
    """1 - |P (z - g)|^2 / 2, of embeddings [N, D]."""

    def __init__(self, goal: Tensor, baseline: Tensor | None, alpha: float) -> None:
        self.goal, self.alpha = goal, alpha if baseline is not None else 0.0
        way = torch.zeros_like(goal) if baseline is None else goal - baseline
        if self.alpha and float(way.norm()) < 1e-6:
            raise ConfigError("reward.baseline says the same as reward.prompt")
        self.way = way / way.norm().clamp(min=1e-12)

    def __call__(self, seen: Tensor) -> Tensor:
        off = seen - self.goal
        along = (off @ self.way)[:, None] * self.way
        return 1 - 0.5 * (self.alpha * along + (1 - self.alpha) * off).square().sum(1)


class Ladders:
    """Expected places on ladders, each [K, D] from worst to best, their mean in [0, 1]."""

    def __init__(self, ladders: list[Tensor], scale: float) -> None:
        self.ladders, self.scale = ladders, scale

    def __call__(self, seen: Tensor) -> Tensor:
        places = [self.place(seen, rungs) for rungs in self.ladders]
        return torch.stack(places).mean(0)

    def place(self, seen: Tensor, rungs: Tensor) -> Tensor:
        steps = torch.linspace(0, 1, len(rungs), device=seen.device)
        return (self.scale * seen @ rungs.T).softmax(1) @ steps


def readout_of(config: Config, model: ImageText, goal: tuple[str, ...]) -> Projected | Ladders:
    """The ladder that is given or known, else goal and baseline."""
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
    """The ladders that end in what each sentence says; those of its parts ("A and B") where every
    part has one; none where a sentence has none."""
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
    """The middle of several phrasings, a unit vector [D]."""
    return functional.normalize(model.texts(sentences).mean(0), dim=0)


def listed(sentences: Sentences) -> tuple[str, ...]:
    return () if sentences is None else (sentences,) if isinstance(sentences, str) else sentences


def require_picture(name: str | None, spec: Spec) -> None:
    """ConfigError where `name` is no image among the observations."""
    if name is not None and (name not in spec.obs or not spec.obs[name].is_image):
        images = [leaf for leaf, about in spec.obs.items() if about.is_image]
        raise ConfigError(
            f"reward.picture={name} is not a picture of this world; there are {images}"
        )


def images_of(rows: Tensors, key: str) -> Tensor:
    """The pictures in `rows`; ConfigError where there are none."""
    if key not in rows:
        raise ConfigError(
            f"the rows hold no {key}: name the picture to look at, reward.picture=LEAF"
        )
    return rows[key]
