"""Shared by both MiniGrid backends: configuration, observation leaves and tokens of missions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.bounds import Count, CountOrZero, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import SYMBOL, Leaf
from embodied.core.tensors import Tensors

# All words of all missions of MiniGrid 3 and BabyAI, and the comma; 0 is "no word".
LIST = (
    ", a after an and at avoid ball behind blue box door end fetch find from front get go goal "
    "green grey hallway in it key lava left matching must near next object of on open opening "
    "pick purple put reach red right room rooms square stay the then this to traverse turn unlock "
    "up use with yellow you your"
)
WORDS = tuple(LIST.split())
PLACES = {word: place for place, word in enumerate(WORDS, start=1)}


COMMON = 8  # words of the longest mission of a level that is not in LONGEST
LONGEST = {
    **dict.fromkeys(("BossLevel", "MiniBossLevel", "SynthSeq"), 72),
    **{
        "GoToSeq": 24,
        "SynthLoc": 17,
        "Synth": 9,
        "PickupLoc": 9,
        "PutNext": 9,
        "MoveTwoAcross": 20,
    },
    **dict.fromkeys(("OpenDoorsOrder", "OpenRedBlueDoors", "OpenTwoDoors"), 10),
    **{"DoorKey": 13, "LockedRoom": 18, "Memory": 11},
    **dict.fromkeys(("LavaCrossing", "LavaGap", "SimpleCrossing"), 10),
}
"""Words of the longest mission, commas included, of the package's levels whose names begin so.
BabyAI puts up to four actions together, such as "put a ball behind you next to a box"."""


def longest_mission(id: str) -> int:
    """Words of the longest mission of a level of MiniGrid or BabyAI; of another one, COMMON."""
    name = id.partition("-")[2]
    found = [start for start in LONGEST if name.startswith(start)]
    return LONGEST[max(found, key=len)] if found else COMMON


@lru_cache(maxsize=4096)
def tokens(mission: str, count: int) -> NDArray[np.int64]:
    """The first `count` words of `mission` as [count] numbers, 0 after its end.

    ConfigError when a word is unknown, or when there are more words than `count`: a mission that is
    cut short is another mission.
    """
    words = mission.replace(",", " , ").split()
    if len(words) > count:
        raise ConfigError(f"mission_words={count} is too small: {mission!r} has {len(words)} words")
    unknown = [word for word in words if word not in PLACES]
    if unknown:
        raise ConfigError(
            f"the mission {mission!r} has a word that is not in the vocabulary: {unknown[0]!r}"
        )
    row = np.zeros(count, np.int64)
    row[: len(words)] = [PLACES[word] for word in words]
    row.flags.writeable = False
    return row


# The largest kind (agent), colour (grey) and state (locked, or the fourth direction) of a cell.
HIGHS = (10, 5, 3)
NOTHING = (1, 0, 0)
DIRECTION = Leaf((), "int64", 0, 3, SYMBOL)


@dataclass(frozen=True)
class Config:
    """Settings of MiniGrid.

    `backend`: "gymnasium" (any id, wrappers, exact state), "envpool" (fast), or "auto": EnvPool
    where it has the id and neither `wrappers` nor `kwargs` are given. `horizon` also scales
    MiniGrid's reward. `mission_words`: 0 adds no mission; longest, as many as the level needs.
    """

    id: str = "MiniGrid-DoorKey-8x8-v0"  # of MiniGrid or BabyAI, or module:Name-v0 of your own
    backend: Literal["auto", "gymnasium", "envpool"] = "auto"  # who simulates
    wrappers: tuple[str | dict[str, Any], ...] = ()  # MiniGrid's, by name, or {name: settings}
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the environment's constructor
    num_envs: Count = 16  # parallel environments
    threads: Count = 2  # CPU threads
    horizon: Count | None = None  # replaces the level's own time limit (steps)
    mission_words: CountOrZero | Literal["longest"] = 0  # adds the mission as so many symbols
    privileged: bool = False  # adds the whole level, for critics and planners
    dt: Positive = 1.0  # control period, s
    seed: CountOrZero = 0  # of the random numbers
    text: str = ""  # task instruction as a sentence

    def __post_init__(self) -> None:
        longest = longest_mission(self.id)
        if self.mission_words and self.words < longest:
            raise ConfigError(
                f"mission_words={self.mission_words} is too small: {self.id} has missions of up to "
                f"{longest} words; set env.mission_words=longest"
            )

    @property
    def words(self) -> int:
        """Symbols of an observed mission; 0: it is not observed."""
        return longest_mission(self.id) if self.mission_words == "longest" else self.mission_words


def cells_leaf(shape: tuple[int, ...]) -> Leaf:
    """Kind, colour and state of cells [across, along, 3], as MiniGrid numbers them."""
    return Leaf(shape, "uint8", 0, HIGHS * (shape[0] * shape[1]), SYMBOL)


def mission_leaf(config: Config) -> Leaf:
    """The words of the mission [words]; 0 is none."""
    return Leaf((config.words,), "int64", 0, len(WORDS), SYMBOL)


def whole_leaves(width: int, height: int) -> dict[str, Leaf]:
    """The level itself [W, H, 3], and the agent: cell, turn, and what it carries."""
    names = ("x", "y", "turn", "carried_kind", "carried_colour")
    highs = (width - 1, height - 1, 3, HIGHS[0], HIGHS[1])
    return {
        "privileged/grid": cells_leaf((width, height, 3)),
        "privileged/agent": Leaf((5,), "int64", 0, highs, SYMBOL, names),
    }


def privileged(rows: Sequence[Mapping[str, np.ndarray]]) -> Tensors:
    """`privileged/*` of rows [n] from their symbolic states."""
    about = [[*row["agent"].tolist(), *row["hand"][0, :2].tolist()] for row in rows]
    return {
        "privileged/grid": torch.from_numpy(np.stack([row["grid"] for row in rows])),
        "privileged/agent": torch.tensor(about, dtype=torch.int64),
    }
