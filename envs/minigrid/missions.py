"""Missions of MiniGrid and BabyAI as tokens of one small vocabulary."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# All words of all missions of MiniGrid 3 and BabyAI, and the comma; 0 is "no word".
LIST = (
    ", a after an and at avoid ball behind blue box door end fetch find from front get go goal "
    "green grey hallway in it key lava left matching must near next object of on open opening "
    "pick purple put reach red right room rooms square stay the then this to traverse turn unlock "
    "up use with yellow you your"
)
WORDS = tuple(LIST.split())
PLACES = {word: place for place, word in enumerate(WORDS, start=1)}


@lru_cache(maxsize=4096)
def tokens(mission: str, count: int) -> NDArray[np.int64]:
    """The first `count` words of `mission` as [count] numbers, 0 after its end.

    ValueError when a word is unknown, or when there are more words than `count`: a mission that is
    cut short is another mission.
    """
    words = mission.replace(",", " , ").split()
    if len(words) > count:
        raise ValueError(f"mission_words={count} is too small: {mission!r} has {len(words)} words")
    unknown = [word for word in words if word not in PLACES]
    if unknown:
        raise ValueError(
            f"the mission {mission!r} has a word that is not in the vocabulary: {unknown[0]!r}"
        )
    row = np.zeros(count, np.int64)
    row[: len(words)] = [PLACES[word] for word in words]
    row.flags.writeable = False
    return row


def mission_of(row: NDArray[np.int64]) -> str:
    """The mission text of the tokens of one env."""
    return " ".join(WORDS[place - 1] for place in row if place).replace(" ,", ",")
