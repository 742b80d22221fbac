"""Photographed: a world with the pictures that rewards watch among its observations.

For recording: what `embodied demos collect` writes of it holds `privileged/picture`, which policies
do not see, and a reward can be learned from that for the same world without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.env import VecEnv
from embodied.core.spec import Leaf
from embodied.rewards.wrappers.render_caption import PICTURE, Watched


@dataclass(frozen=True)
class Config:
    """Pictures of `size` x `size` pixels, one of each view."""

    size: int = 64


class Photographed(Watched):
    """`env` with `privileged/picture`, uint8 [B, size, V size, 3] of V views."""

    def __init__(self, config: Config, env: VecEnv) -> None:
        leaf = Leaf((config.size, env.views * config.size, 3), "uint8", 0, 255)
        super().__init__(env, PICTURE, leaf, lambda index: env.photographs(index, config.size))
