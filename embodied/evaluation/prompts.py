"""Prompts: what a policy of every reward is asked to do, from recordings (RL Zero, 2024).

    reward: u = E B(s') r(s, a, s')      goal: u = B(g)      demonstration: u = mean B(s)

A goal that names some elements of the observation stands for the recorded states that are nearest
to it. Frames (a film, an imagination) are projected: each stands for the recorded state whose
picture is most like it; a frame that is less like all of them than recorded pictures are like each
other is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Spec, SpecMismatch, require_same
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import transitions
from embodied.policies.abilities import TakesPrompts
from embodied.vision.image_text import ImageText

PROBES = 500  # recorded pictures that say how like pictures are
RARE = 0.01  # share of these that would be left out themselves
BATCH = 4096


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
