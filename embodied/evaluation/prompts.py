"""Prompts: what a policy of every reward is asked to do, from recordings (RL Zero, 2024).

    reward: u = E B(s') r(s, a, s')      goal: u = B(g)      demonstration: u = mean B(s)

A goal that names some elements of the observation stands for the recorded states that are nearest
to it. Frames (a film, an imagination) are projected: each stands for the recorded state whose
picture is most like it; a frame that is less like all of them than recorded pictures are like each
other is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Count, Number
from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Spec, SpecMismatch, require_same
from embodied.core.tensors import Tensors
from embodied.datasets.hub import local_folder
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.datasets.transitions import transitions
from embodied.policies.abilities import TakesPrompts
from embodied.vision.contrastive import open_image_text
from embodied.vision.image_text import ImageText

PROBES = 500  # recorded pictures that say how like pictures are
RARE = 0.01  # share of these that would be left out themselves
BATCH = 4096


@dataclass(frozen=True)
class Config:
    """Settings of a prompt; one of `reward`, `goal`, `demos` and `frames` is given."""

    out: str  # folder of the prompted run; must not exist
    reward: str | None = None  # dataset whose rewards are to be maximised
    goal: dict[str, Number] = field(default_factory=dict)  # elements of the state to be in
    demos: str | None = None  # dataset whose states are to be visited
    frames: str | None = None  # dataset whose pictures are to be seen, in any order
    among: str | None = None  # dataset in which the states of goal and frames are looked up
    last: Count | None = None  # states or frames of each episode, from its end; null: all
    nearest: Count = 32  # recorded states that a goal stands for
    camera: str | None = None  # observation with the pictures; null: the only one
    encoder: str = "simclip"  # of pictures: simclip, a CLIP or SigLIP folder, a name on the hub


def require_states(spec: Spec, episodes: Episodes, what: str) -> None:
    """SpecMismatch if recordings (`what`) lack observations of a policy of `spec`."""
    there = episodes.spec
    known = {name: leaf for name, leaf in there.obs.items() if name in spec.obs}
    try:
        require_same(spec, Spec(known, there.act, there.dt), "the policy", what)
    except SpecMismatch as error:
        raise SpecMismatch(f"{what}: {error}") from error


def of_reward(policy: TakesPrompts, spec: Spec, episodes: Episodes) -> Tensor:
    """u [d] of the recorded rewards. ConfigError if all are 0."""
    if not (episodes.steps["reward"] != 0).any():
        raise ConfigError("the recorded rewards are all 0: there is nothing to maximise")
    rows = transitions(episodes, gamma=1.0)
    following = {name: value for name, value in tt.under(rows, "next_obs").items()}
    known = embedded(policy, {name: following[name] for name in spec.obs})
    return (known * rows["reward"][:, None]).mean(0)


def of_states(policy: TakesPrompts, states: Tensors) -> Tensor:
    """u [d] of states [n, ...]: to be where they are."""
    return embedded(policy, states).mean(0)


@torch.no_grad()
def embedded(policy: TakesPrompts, states: Tensors) -> Tensor:
    """B [n, d] of states [n, ...]."""
    count = tt.length(states)
    every = torch.arange(count)
    return torch.cat([policy.embed(load(tt.take(states, part))) for part in every.split(BATCH)])


def states_of(spec: Spec, episodes: Episodes, last: int | None = None) -> Tensors:
    """The recorded states [n, ...] with the observations of `spec`, the final ones included; of
    each episode only the `last` ones (None: all)."""
    index: list[Tensor] = []
    for start, length in zip(episodes.start.tolist(), episodes.length.tolist(), strict=True):
        skipped = 0 if last is None else max(length + 1 - last, 0)
        index.append(torch.arange(start + skipped, start + length))
    chosen = torch.cat(index)
    return {
        name: torch.cat([episodes.steps[f"obs/{name}"][chosen], episodes.final[name]])
        for name in spec.obs
    }


def nearest_states(
    spec: Spec, states: Tensors, goal: Mapping[str, float], count: int
) -> tuple[Tensors, dict[str, float]]:
    """The `count` of `states` nearest to a goal, {element: value}, in units of the elements'
    standard deviations; and the largest distance to it of each element. ConfigError for an
    unknown element."""
    columns: dict[str, Tensor] = {}
    for name, leaf in spec.obs.items():
        if leaf.dtype == "float32" and len(leaf.shape) == 1:
            words = leaf.names or [f"{name}[{k}]" for k in range(leaf.size)]
            columns |= dict(zip(words, states[name].T, strict=True))
    for name in goal:
        if name not in columns:
            raise ConfigError(f'goal: no element "{name}"{nearest(name, columns)}')
    values = torch.stack([columns[name] for name in goal], 1)
    off = (values - torch.tensor([*goal.values()])).abs()
    distance = (off / values.std(0, correction=0).clamp(min=1e-6)).norm(dim=1)
    chosen = distance.argsort()[:count]
    far = dict(zip(goal, off[chosen].amax(0).tolist(), strict=True))
    return tt.take(states, chosen), far


def projected(
    frames: Tensor, recorded: Tensor, episode: Tensor, encoder: ImageText
) -> tuple[Tensor, int]:
    """For pictures `frames` [n, H, W, 3] the places [m] of the most similar ones of `recorded`
    [N, H, W, 3], and how many frames are like none. `episode` [N]: the episode of each recorded
    picture; pictures of other episodes say how like pictures are. ConfigError if all are unlike."""
    known, seen = encoder.images(recorded), encoder.images(frames)
    probes = torch.linspace(0, len(known) - 1, min(PROBES, len(known))).round().long()
    among = known[probes] @ known.T
    among[episode[probes][:, None] == episode] = -1.0
    least = among.amax(1).quantile(RARE)
    like, place = (seen @ known.T).max(1)
    kept = place[like >= least]
    if not len(kept):
        raise ConfigError(
            f"the frames are unlike what was recorded: similarity at most {like.max():.3f}, and "
            f"recorded pictures of different episodes have {least:.3f}; record with that camera"
        )
    return kept, len(place) - len(kept)


def vector(policy: Any, config: Config, source: str) -> tuple[Tensor, str]:
    """u [d] of what `config` asks for, by the recordings `source`; and what was done, in words."""
    episodes = read_episodes(local_folder(source))
    require_states(policy.spec, episodes, f"dataset {source}")
    if config.reward is not None:
        count = len(episodes.steps["reward"])
        return of_reward(policy, policy.spec, episodes), f"rewards of {count:,} steps"
    states = states_of(policy.spec, episodes, config.last if config.demos else None)
    said = f"states of {len(episodes)} episodes"
    if config.goal:
        states, far = nearest_states(policy.spec, states, config.goal, config.nearest)
        said = "recorded states; farthest from the goal: " + ", ".join(
            f"{name} {off:.3g}" for name, off in far.items()
        )
    if config.frames is not None:
        place, unlike = looked_up(config, episodes, read_episodes(local_folder(config.frames)))
        states = {name: value[place] for name, value in states.items()}
        said = f"recorded states like {len(place)} frames; {unlike} frames are unlike all of them"
    return of_states(policy, states), said


def looked_up(config: Config, recorded: Episodes, film: Episodes) -> tuple[Tensor, int]:
    """The places of the recorded states whose pictures are most like the frames of `film`."""
    known = [name for name, leaf in recorded.spec.obs.items() if leaf.is_image]
    cameras = known if config.camera is None else [config.camera]
    if len(cameras) != 1 or cameras[0] not in known or cameras[0] not in film.spec.obs:
        raise ConfigError(f"camera=NAME should be a camera of both datasets: {', '.join(known)}")
    own = Spec({cameras[0]: recorded.spec.obs[cameras[0]]}, recorded.spec.act, recorded.spec.dt)
    seen = load(states_of(own, film, config.last))[cameras[0]]
    there = load(states_of(own, recorded))[cameras[0]]
    every = torch.arange(len(recorded))
    episode = torch.cat([every.repeat_interleave(recorded.length), every])
    return projected(seen, there, episode, open_image_text(config.encoder, "cpu"))
