"""The image that the run's reward is computed from, rendered at every step as in training.

Rewards on images (`AugmentsEnv`) add an observation to the environment they are trained in. The
viewer builds the same wrapper around the displayed environment and stores its image per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.reward import AddedObservation, AugmentsEnv, Reward
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.viewer.session.snapshot import CompressedImage

SCORE = "image score"
"""Name of the plotted score of the image."""


@runtime_checkable
class ScoresImages(Protocol):
    """A reward that scores single images, separately from the reward it computes from them."""

    def score(self, pictures: Tensor) -> Tensor:
        """Scores [N] of uint8 images [N, H, W, 3]."""
        ...


class UnsupportedReward(RuntimeError):
    """The reward needs more observations than one rendered image."""


@dataclass(frozen=True)
class RewardCamera:
    """Captures the image of parallel env 0 that wrapper `layer` adds for the reward.

    `layer` is None if the reward needs no image; `name` is the observation that it adds. If
    `hides_terminations`, the reward was trained with terminations treated as truncations.
    """

    layer: AddedObservation | None
    name: str
    hides_terminations: bool

    def capture(self) -> CompressedImage | None:
        """The image after the last step; the final one of an episode that has just ended."""
        if self.layer is None:
            return None
        return CompressedImage.of(self.layer.added_observation(0).cpu().numpy())

    def observation(self, image: CompressedImage | None) -> Tensors:
        """`image` as the observation [1, H, W, 3] that the reward reads."""
        if self.layer is None or image is None:
            return {}
        return {self.name: torch.from_numpy(image.picture().copy())[None]}


def reward_camera(reward: Reward, env: VecEnv) -> RewardCamera:
    """The camera for `reward` on `env`; UnsupportedReward if the reward needs anything else than
    one image or none."""
    layers: list[Wrapper] = []
    outer = reward.augment_env(env) if isinstance(reward, AugmentsEnv) else env
    while outer is not env and isinstance(outer, Wrapper):
        layers.append(outer)
        outer = outer.env
    # Wrappers forward attributes to the inner environment, so the class is asked.
    adding = [layer for layer in layers if issubclass(type(layer), AddedObservation)]
    known = all(layer in adding or layer.hides_terminations for layer in layers)
    if not known or len(adding) > 1 or not all(is_image(layer) for layer in adding):
        raise UnsupportedReward("this reward needs observations other than one image")
    hides = any(layer.hides_terminations for layer in layers)
    if not adding:
        return RewardCamera(None, "", hides)
    layer = adding[0]
    assert isinstance(layer, AddedObservation)
    return RewardCamera(layer, added_name(layer), hides)


def added_name(layer: Wrapper) -> str:
    """The observation that `layer` adds to those of the environment inside it."""
    return next(name for name in layer.spec.obs if name not in layer.env.spec.obs)


def is_image(layer: Wrapper) -> bool:
    return layer.spec.obs[added_name(layer)].is_image
