"""Offline preference learning: fits a reward to labelled pairs of observations of a dataset.

The reward is checked on held-out episodes. Offline RL-VLM-F (Venkataraman et al., 2024): half of
the pairs are two observations of the same episode, half of two episodes, so that long episodes and
their uneventful parts do not dominate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, nearest
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import transitions
from embodied.nn.statistics import spearman
from embodied.rewards.preferences.bradley_terry import Labels, joined

CHECKED = 2000  # pairs to compare with the recorded reward


def reached_observations(episodes: Episodes, names: set[str]) -> Tensors:
    """The observation after every step of a dataset: `names`, with `reward` and `episode`."""
    for name in names - set(episodes.final):
        raise ConfigError(
            f"the dataset has no {name}{nearest(name, episodes.final)}; choose another: "
            "reward.leaf=NAME (and reward.picture=NAME if the labeller needs images)"
        )
    rows = transitions(episodes, gamma=1.0)
    following = {name: rows[f"next_obs/{name}"] for name in names}
    return {**following, "reward": rows["reward"], "episode": rows["episode"]}


def split(count: int, held_out: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of training and of held-out episodes; at least one of each."""
    if count < 2:
        raise ConfigError("at least two episodes are needed: one is held out to check the reward")
    order = torch.randperm(count, generator=random)
    apart = min(max(1, round(held_out * count)), count - 1)
    return order[apart:], order[:apart]


def sample_pairs(episodes: Episodes, among: Tensor, n: int, random: torch.Generator) -> Tensor:
    """Indices of n pairs [2, n], uniform in time; every other pair is within one episode."""
    pick = among[torch.randint(len(among), (2, n), generator=random)]
    pick[1, ::2] = pick[0, ::2]
    place = torch.rand(2, n, generator=random) * episodes.length[pick]
    return episodes.start[pick] + place.long()


def gather(ask: Callable[[int], Labels | None], want: int, at_once: int) -> Labels | None:
    """Labels of up to `want` pairs; fewer if labelling ends early, None if there are none."""
    parts: list[Labels] = []
    while (known := sum(len(part[2]) for part in parts)) < want:
        found = ask(min(at_once, want - known))
        if found is None:
            break
        parts.append(found)
    return joined(parts) if parts else None


def agreement(score: Tensor, reward: Tensor, episode: Tensor) -> dict[str, float]:
    """Agreement of scores [N] with recorded rewards [N]: `pairs`, the fraction of random pairs
    (without ties) in the same order; `returns`, Spearman's correlation of the episodes' sums."""
    random = torch.Generator().manual_seed(0)
    one, two = torch.randint(len(score), (2, CHECKED), generator=random)
    true = reward[two] - reward[one]
    told = true.abs() > 1e-6
    same = ((score[two] - score[one]) * true > 0) & told
    count = int(episode.max()) + 1
    present = torch.bincount(episode, minlength=count) > 0
    sums = [torch.zeros(count).index_add(0, episode, each)[present] for each in (score, reward)]
    return {"pairs": float(same.sum() / told.sum()), "returns": spearman(sums[0], sums[1])}


def rows_of_episodes(transitions: Tensors, among: Tensor) -> Tensors:
    """The transitions of the episodes `among`."""
    return tt.take(transitions, torch.isin(transitions["episode"], among).nonzero().flatten())
