"""Scenes: images of our environments in random and scripted states, with their facts.

States are selected so that all rungs of the ladder that measures success are about equally
frequent; the end of an episode is rendered before the environment resets.
"""

from __future__ import annotations

from benchmarks.simclip.album import Progress, SceneStore
from benchmarks.simclip.captions import Scenes
from benchmarks.simclip.facts import FR3, SceneFacts
from benchmarks.simclip.facts_small import SMALL
from benchmarks.simclip.posed_scenes import posed
from benchmarks.simclip.robot_scenes import robot
from embodied.core.build import ConfigError, nearest
from embodied.core.device import forked

ENVS = (*(f"fr3_{task}" for task in FR3), *SMALL)


def facts_of(env_name: str) -> SceneFacts:
    """The facts of an environment; ConfigError if it has none."""
    known = {**{f"fr3_{task}": told for task, told in FR3.items()}, **SMALL}
    if env_name not in known:
        raise ConfigError(f"no captions for environment {env_name!r}{nearest(env_name, known)}")
    return known[env_name]


def collect(
    env_name: str,
    count: int,
    size: int,
    seed: int,
    tracks: int = 0,
    shown: Progress = lambda kept: None,
) -> Scenes:
    """`count` images of `size` pixels in varied states, or (with `tracks`) that many scripted
    successful episodes, every step of them; another `seed` gives other scenes."""
    album = SceneStore(facts_of(env_name), size, count)
    with forked(seed):
        if env_name.startswith("fr3_"):
            robot(env_name.removeprefix("fr3_"), album, seed, tracks, shown)
        elif env_name == "minigrid_doorkey":
            from benchmarks.simclip.room_scenes import rooms  # needs minigrid

            rooms(album, seed, tracks, shown)
        else:
            posed(env_name, album, seed, tracks, shown)
    return album.scenes(env_name)
