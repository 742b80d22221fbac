"""SceneStore: images with their facts, balanced over the rungs of a ladder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.simclip.captions import Scenes, fact_matrix, ladder_positions
from benchmarks.simclip.facts import SceneFacts

ROWS = 32
Progress = Callable[[int], None]


@dataclass
class SceneStore:
    """The images collected so far, with named elements and track numbers."""

    told: SceneFacts
    size: int
    wanted: int
    pictures: list[Tensor] = field(default_factory=list)
    named: list[dict[str, Tensor]] = field(default_factory=list)
    tracks: list[Tensor] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    kept: int = 0

    @property
    def full(self) -> bool:
        return self.kept >= self.wanted

    def rungs(self, named: dict[str, Tensor]) -> Tensor:
        """The rung of each image on the ladder that measures success."""
        quantities, _ = self.told.read(named)
        ladder = next(each for each in self.told.words.ladders if each.name == self.told.climbs)
        return ladder.rung(quantities[self.told.climbs])

    def rare(self, named: dict[str, Tensor], most: int) -> Tensor:
        """Up to `most` envs whose rungs are underrepresented, in random order."""
        rungs, chosen = self.rungs(named), []
        ladder = next(each for each in self.told.words.ladders if each.name == self.told.climbs)
        fair = 1.5 * self.kept / len(ladder.rungs) + 16
        for row in torch.randperm(len(rungs)).tolist():
            rung = int(rungs[row])
            if len(chosen) < most and self.counts.get(rung, 0) < fair:
                self.counts[rung] = self.counts.get(rung, 0) + 1
                chosen.append(row)
        return torch.tensor(chosen, dtype=torch.int64)

    def add(self, pictures: Tensor, named: dict[str, Tensor], track: Tensor | None = None) -> None:
        if len(pictures):
            self.pictures.append(pictures)
            self.named.append(named)
            none = torch.full((len(pictures),), -1) if track is None else track
            self.tracks.append(none)
            self.kept += len(pictures)

    def scenes(self, env_name: str) -> Scenes:
        named = {k: torch.cat([part[k] for part in self.named]) for k in self.named[0]}
        quantities, flags = self.told.read(named)
        return Scenes(
            env_name,
            self.told.words,
            torch.cat(self.pictures),
            fact_matrix(self.told.words, quantities, flags),
            ladder_positions(self.told.words, quantities),
            torch.cat(self.tracks),
            (self.told.climbs,),
        )


def picked(named: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """The entries `index` of named elements [n]."""
    return {key: value[index] for key, value in named.items()}


def numbers(mask: Tensor) -> list[int]:
    """Indices where `mask` [n] is true."""
    return mask.nonzero().flatten().tolist()
