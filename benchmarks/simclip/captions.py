"""Facts about images and their captions: many phrasings, held-out ones, and ordered ladders.

A fact is true or false of a scene and has many phrasings, some of which are never used in training.
A ladder is a quantity in words: facts from worst to best, exactly one of which is true.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HELD = 7  # one in HELD phrasings is held out


@dataclass(frozen=True)
class Fact:
    """`phrases` are for training, `held_out` for evaluation only."""

    name: str
    phrases: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class Ladder:
    """`rungs`: facts from worst to best; `edges`: the values of the quantity between them,
    increasing or decreasing; `ends`: the values at which the scale of the first and the last rung
    ends."""

    name: str
    rungs: tuple[Fact, ...]
    edges: tuple[float, ...]
    ends: tuple[float, float]

    def __post_init__(self) -> None:
        marks = (self.ends[0], *self.edges, self.ends[1])
        rising = list(marks) == sorted(marks)
        if len(self.edges) != len(self.rungs) - 1 or not (
            rising or list(marks[::-1]) == sorted(marks)
        ):
            raise ValueError(f"ladder {self.name}: edges {self.edges} do not fit its rungs")

    def rung(self, quantity: Tensor) -> Tensor:
        """Index [n] (int64) of the rung of each `quantity` [n]."""
        sign = 1.0 if self.ends[1] > self.ends[0] else -1.0
        edges = sign * torch.tensor(self.edges, dtype=quantity.dtype)
        return torch.bucketize(sign * quantity, edges, right=True)

    def place(self, quantity: Tensor) -> Tensor:
        """`quantity` [n] as a position from 0 to the index of the last rung; strictly increasing in
        the right direction between the ends."""
        marks = torch.tensor((self.ends[0], *self.edges, self.ends[1]), dtype=quantity.dtype)
        at = self.rung(quantity)
        share = ((quantity - marks[at]) / (marks[at + 1] - marks[at])).clamp(0, 1)
        count = len(self.rungs)
        return (at + share) * (count - 1) / count


@dataclass(frozen=True)
class CaptionSet:
    """All facts of one environment."""

    ladders: tuple[Ladder, ...]
    plain: tuple[Fact, ...]

    @property
    def facts(self) -> tuple[Fact, ...]:
        return (*(rung for ladder in self.ladders for rung in ladder.rungs), *self.plain)


@dataclass(frozen=True)
class Scenes:
    """Images uint8 [N, s, s, 3] of one environment; `facts` [N, F] (bool) in the order of
    `words.facts`; `places` [N, L] on its ladders; `track` [N] (int64): index of the scripted
    episode, or -1; `moved`: the ladder that the tracks climb."""

    env: str
    words: CaptionSet
    pictures: Tensor
    facts: Tensor
    places: Tensor
    track: Tensor
    moved: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pictures)


def fact(name: str, phrases: Sequence[str]) -> Fact:
    """A fact with every seventh phrasing held out (chosen by hash, so that it is the same in every
    run); at least three are for training, and one is held out."""
    ordered = sorted(set(phrases), key=lambda text: (zlib.crc32(text.encode()), text))
    if len(ordered) < 4:
        raise ValueError(f"fact {name} needs at least four phrasings, it has {len(ordered)}")
    kept = max(3, len(ordered) - max(1, round(len(ordered) / HELD)))
    return Fact(name, tuple(ordered[:kept]), tuple(ordered[kept:]))


def fill_templates(templates: Sequence[str], **words: Sequence[str]) -> list[str]:
    """Every template with every combination of words for its slots."""
    return [
        template.format(**dict(zip(words, chosen, strict=True)))
        for template in templates
        for chosen in itertools.product(*words.values())
    ]


def ladder(
    name: str,
    edges: Sequence[float],
    ends: tuple[float, float],
    phrases: Sequence[Sequence[str]],
) -> Ladder:
    """A ladder from the phrasings of its rungs."""
    rungs = tuple(fact(f"{name} {i}", each) for i, each in enumerate(phrases))
    return Ladder(name, rungs, tuple(edges), ends)


def fact_matrix(
    words: CaptionSet, quantities: dict[str, Tensor], flags: dict[str, Tensor]
) -> Tensor:
    """Facts [n, F] (bool) from the quantities [n] of ladders and the flags [n] of plain facts."""
    columns = []
    for each in words.ladders:
        rung = each.rung(quantities[each.name])
        columns += [rung == number for number in range(len(each.rungs))]
    return torch.stack([*columns, *(flags[each.name] for each in words.plain)], 1)


def ladder_positions(words: CaptionSet, quantities: dict[str, Tensor]) -> Tensor:
    """Positions [n, L] on the ladders."""
    places = [each.place(quantities[each.name]) for each in words.ladders]
    first = next(iter(quantities.values()))
    return torch.stack(places, 1).float() if places else torch.zeros(len(first), 0)
