"""Offline preference learning: fits a reward to labelled pairs of observations of a dataset.

The reward is checked on held-out episodes. Offline RL-VLM-F (Venkataraman et al., 2024): half of
the pairs are two observations of the same episode, half of two episodes, so that long episodes and
their uneventful parts do not dominate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, nearest
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import transitions
from embodied.nn.statistics import spearman
from embodied.rewards.preferences.bradley_terry import Labels, joined
from embodied.rewards.preferences.labellers import ABSTAIN, SECOND, SKIPPED, TIE, Labeller

CHECKED = 2000  # pairs to compare with the recorded reward
AT_ONCE = 40  # pairs that a labeller gets at once

logger = logging.getLogger(__name__)


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


def sample_pairs(
    episodes: Episodes, among: Tensor, n: int, random: torch.Generator, steps: int = 1
) -> Tensor:
    """Indices of n pairs [2, n], uniform in time; every other pair is within one episode. With
    `steps` they are first steps of segments of that length, which the episodes `among` hold."""
    pick = among[torch.randint(len(among), (2, n), generator=random)]
    pick[1, ::2] = pick[0, ::2]
    place = torch.rand(2, n, generator=random) * (episodes.length[pick] - steps + 1)
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
    one, two = torch.randint(len(score), (2, CHECKED), generator=torch.Generator().manual_seed(0))
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


class SegmentPairs:
    """A `Source` of labelled pairs of segments, for a learner that learns from preferences itself.

    A batch of n has the leaves of `rows` (`obs/*`, `action`) as [n, 2, segment, ...], and `label`
    [n] (float32), the probability that the second segment is preferred: 0, 1/2 or 1. A segment is
    `segment` successive steps of one episode. A labeller that needs images sees the last one of a
    segment, another one the sum of its rewards.

    The labels are part of the state; they are asked for when they are first needed, so that a
    resumed run asks for none.
    """

    def __init__(
        self,
        rows: Tensors,
        episodes: Episodes,
        labeller: Labeller,
        segment: int,
        count: int,
        picture: str | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if segment < 1:
            raise ValueError(f"segment={segment} should be at least 1")
        self.among = (episodes.length >= segment).nonzero().flatten()
        if not len(self.among):
            raise ConfigError(
                f"no episode has the {segment} steps of a segment; the longest has "
                f"{int(episodes.length.max())}"
            )
        self.picture = _picture(episodes, picture) if labeller.needs_images else None
        self.rows = {key: value.to(device).contiguous() for key, value in rows.items()}
        self.episodes, self.labeller = episodes, labeller
        self.segment, self.count = segment, count
        self.device = torch.device(device)
        self.random = torch.Generator().manual_seed(seed)
        self.labels: Labels | None = None  # first steps of both segments, and the targets

    def __len__(self) -> int:
        return self.count

    def labelled(self) -> Labels:
        """The first steps [m] of both segments and the targets [m], which are asked for now if they
        were not yet; ConfigError if there is no label."""
        if self.labels is None:
            found = gather(self._ask, self.count, AT_ONCE)
            if found is None:
                reason = self.labeller.stopped or "it always abstained"
                raise ConfigError(f"the labeller gave no label ({reason})")
            if len(found[2]) < self.count:
                reason = self.labeller.stopped or "it abstained"
                logger.warning("%d of %d pairs are labelled: %s", len(found[2]), self.count, reason)
            self._set(found)
        assert self.labels is not None
        return self.labels

    def _set(self, labels: Labels) -> None:
        first, second, target = (part.to(self.device) for part in labels)
        self.labels = first, second, target

    def _ask(self, n: int) -> Labels | None:
        """Labels of up to `n` new pairs; None where labelling ended."""
        if self.labeller.stopped:
            return None
        first, second = sample_pairs(self.episodes, self.among, n, self.random, self.segment)
        self.labeller.submit(range(n), self._evidence(first), self._evidence(second))
        found = self.labeller.poll(wait=True)
        labels = torch.tensor([found.get(pair, SKIPPED) for pair in range(n)])
        answered = ((labels != ABSTAIN) & (labels != SKIPPED)).nonzero().flatten()
        if not len(answered):
            return None
        target = torch.where(labels == TIE, 0.5, (labels == SECOND).float())[answered]
        return first[answered], second[answered], target

    def _evidence(self, first: Tensor) -> Tensors:
        """What the labeller gets of the segments that begin at `first` [n]."""
        within = first[:, None] + torch.arange(self.segment)
        evidence = {"reward": self.episodes.steps["reward"][within].sum(1)}
        if self.picture is not None:
            shown = {"picture": self.episodes.steps[f"obs/{self.picture}"]}
            evidence |= load(tt.take(shown, within[:, -1]))
        return evidence

    def sample(self, n: int) -> Tensors:
        """`n` pairs with replacement, by torch's default generator."""
        first, second, target = self.labelled()
        pick = torch.randint(len(target), (n,), device=self.device)
        begin = torch.stack([first[pick], second[pick]], 1)
        index = begin[:, :, None] + torch.arange(self.segment, device=self.device)
        rows = load(tt.take(self.rows, index.flatten()))
        pairs = tt.each(rows, lambda value: value.unflatten(0, tuple(index.shape)))
        return {**pairs, "label": target[pick]}

    def metrics(self) -> dict[str, float]:
        """The number of labelled pairs and the fraction of ties among them."""
        target = self.labelled()[2]
        ties = float((target == 0.5).float().mean())
        return {"data/pairs": float(len(target)), "data/tied_pairs": ties}

    def get_state(self) -> dict[str, Any]:
        return {"labels": list(self.labelled())}

    def set_state(self, state: dict[str, Any]) -> None:
        first, second, target = state["labels"]
        self._set((first, second, target))


def _picture(episodes: Episodes, name: str | None) -> str:
    """The image that a labeller is given."""
    images = [leaf for leaf, spec in episodes.spec.obs.items() if spec.is_image]
    if name is None and len(images) == 1:
        return images[0]
    if name not in images:
        raise ConfigError(
            f"the labeller needs an image of each segment, and {name or 'none'} is no image of the "
            f"dataset{nearest(name or '', images)}: data.pairs.picture=NAME"
        )
    return name
