"""Scenes: pictures of our worlds in random and scripted states, with the facts that hold in them.

States are picked so that every rung of the ladder that success climbs is seen about as often; the
end of an episode is drawn before the world begins the next one.
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
    """What can be said of a world; ConfigError for one that has no words yet."""
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
    """`count` pictures of `size` pixels in states of all kinds, or (with `tracks`) that many
    scripted ways to success, every step of them; another `seed`, other scenes."""
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
