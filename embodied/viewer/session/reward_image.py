"""Scored: the picture that a reward looks at beside the observations, taken at every step.

Rewards from pictures are trained in a world that photographs itself for them. Here the same
photographs are taken of the world that is shown, and kept with each moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.reward import AugmentsEnv, Reward
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.rewards.wrappers.no_termination import NoTerminationWrapper
from embodied.rewards.wrappers.render_caption import RenderObservation
from embodied.viewer.session.snapshot import Packed

SCORE = "picture score"
"""Name of the number that says how well a picture is what the reward asks for."""


@runtime_checkable
class Scores(Protocol):
    """A reward that can say how well pictures do, apart from what it pays for them."""

    def score(self, pictures: Tensor) -> Tensor:
        """[N], of uint8 pictures [N, H, W, 3]."""
        ...


class Unseen(RuntimeError):
    """A reward looks at more than a picture of the world."""


@dataclass(frozen=True)
class Lookout:
    """Takes the picture of row 0 that `layer` adds to the observations in training (None: the
    reward needs none). With `endless`, it was never told of an end."""

    layer: RenderObservation | None
    endless: bool

    def take(self) -> Packed | None:
        """What is to be seen now; of a row that has just ended, the last of it."""
        if self.layer is None:
            return None
        ends, self.layer.ends = self.layer.ends, {}
        picture = ends[0] if 0 in ends else self.layer.look(self.layer.every)[0]
        return Packed.of(picture.cpu().numpy())

    def leaf(self, photo: Packed | None) -> Tensors:
        """The observation [1, H, W, 3] that `photo` is."""
        if self.layer is None or photo is None:
            return {}
        return {self.layer.name: torch.from_numpy(photo.picture().copy())[None]}


def lookout_of(reward: Reward, env: VecEnv) -> Lookout:
    """For what `reward` looks at in `env`; Unseen where that is not one picture, or none."""
    layers: list[VecEnv] = []
    outer = reward.augment_env(env) if isinstance(reward, AugmentsEnv) else env
    while outer is not env and isinstance(outer, Wrapper):
        layers.append(outer)
        outer = outer.env
    pictures = [layer for layer in layers if isinstance(layer, RenderObservation)]
    known = all(isinstance(layer, RenderObservation | NoTerminationWrapper) for layer in layers)
    if not known or len(pictures) > 1 or not all(is_picture(layer) for layer in pictures):
        raise Unseen("this reward looks at more than a picture")
    endless = any(isinstance(layer, NoTerminationWrapper) for layer in layers)
    return Lookout(pictures[0] if pictures else None, endless)


def is_picture(layer: RenderObservation) -> bool:
    return layer.spec.obs[layer.name].is_image
