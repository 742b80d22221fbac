"""Scenes: images of our environments in random and scripted states, with their facts.

States are selected so that all rungs of the ladder that measures success are about equally
frequent; the end of an episode is rendered before the environment resets.
"""

from __future__ import annotations

import torch

from embodied.core.build import ConfigError, nearest
from embodied.vision.captions import Scenes
from envs.simclip.album import Progress, SceneStore
from envs.simclip.facts import FR3, SceneFacts
from envs.simclip.facts_small import SMALL
from envs.simclip.posed_scenes import posed
from envs.simclip.robot_scenes import robot

WORLDS = (*(f"fr3_{task}" for task in FR3), *SMALL)


def facts_of(world: str) -> SceneFacts:
    """The facts of an environment; ConfigError if it has none."""
    known = {**{f"fr3_{task}": told for task, told in FR3.items()}, **SMALL}
    if world not in known:
        raise ConfigError(f"nothing can be said of the world {world!r}{nearest(world, known)}")
    return known[world]


def collect(
    world: str,
    count: int,
    size: int,
    seed: int,
    tracks: int = 0,
    shown: Progress = lambda kept: None,
) -> Scenes:
    """`count` images of `size` pixels in varied states, or (with `tracks`) that many scripted
    successful episodes, every step of them; another `seed` gives other scenes."""
    album = SceneStore(facts_of(world), size, count)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if world.startswith("fr3_"):
            robot(world.removeprefix("fr3_"), album, seed, tracks, shown)
        elif world == "minigrid_doorkey":
            from envs.simclip.room_scenes import rooms  # needs minigrid

            rooms(album, seed, tracks, shown)
        else:
            posed(world, album, seed, tracks, shown)
    return album.scenes(world)
