"""LevelBuffer: the replay buffer of levels of prioritized level replay (PLR).

Jiang, Grefenstette and Rocktaschel, 2021. Sampling probabilities from score ranks (1: best) and
staleness:

    P = (1 - c) P_score + c P_stale,   P_score ~ (1 / rank)^(1 / beta),   P_stale ~ C - C_i

C is the number of samples so far, C_i its value when level i was last sampled. Ranks are those
among the levels that are not being played: with many parallel envs and a low beta, most of them
would otherwise play the level with the best score at the same time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.teachers.task_space import Floats


class LevelBuffer:
    """At most `size` levels [D]. Each has a number, which it keeps while it is in the buffer."""

    def __init__(self, size: int, width: int, beta: float, staleness: float) -> None:
        self.size = size
        self.beta = beta
        self.staleness = staleness
        self.level = np.zeros((size, width))
        self.score = np.zeros(size)
        self.best = np.zeros(size)
        self.drawn = np.zeros(size, np.int64)
        self.number = np.zeros(size, np.int64)
        self.count = 0
        self.given = 0
        self.clock = 0
        self.place: dict[int, int] = {}  # of a number
        self.named: dict[bytes, int] = {}  # the number of a level

    def __len__(self) -> int:
        return self.count

    def chances(self, played: Collection[int] = ()) -> Floats:
        """Sampling probabilities [n] of the levels in the buffer; 0 for the numbers `played`,
        unless these are all."""
        n = self.count
        free = np.ones(n, dtype=bool)
        free[[self.place[number] for number in played if number in self.place]] = False
        if not free.any():
            free[:] = True
        rank = np.empty(n)
        order = np.argsort(np.where(free, -self.score[:n], np.inf), kind="stable")
        rank[order] = np.arange(1, n + 1)
        # In logarithms: the power itself may underflow.
        weight = np.exp(-np.log(rank) / self.beta) * free
        old = (self.clock - self.drawn[:n]) * free.astype(float)
        old = old / old.sum() if old.any() else free / free.sum()
        return (1 - self.staleness) * weight / weight.sum() + self.staleness * old

    def sample(self, random: np.random.Generator, played: Collection[int] = ()) -> int:
        """Sample a level that is not one of the numbers `played`; returns its number."""
        place = int(random.choice(self.count, p=self.chances(played)))
        self.clock += 1
        self.drawn[place] = self.clock
        return int(self.number[place])

    def get(self, number: int) -> Floats | None:
        """Level `number` [D]; None if it was replaced."""
        place = self.place.get(number)
        return None if place is None else self.level[place].copy()

    def find(self, level: Floats) -> int | None:
        """The number of `level`; None if it is not in the buffer."""
        return self.named.get(level.tobytes())

    def best_of(self, number: int | None) -> float:
        """The highest return on level `number`; -inf if it is not in the buffer."""
        place = None if number is None else self.place.get(number)
        return -np.inf if place is None else float(self.best[place])

    def update_score(self, number: int, score: float, best: float) -> None:
        """Set the score of level `number`, if it is still in the buffer."""
        place = self.place.get(number)
        if place is not None:
            self.score[place], self.best[place] = score, max(best, float(self.best[place]))

    def add(self, level: Floats, score: float, best: float) -> bool:
        """Add a new level if there is room, or if its score is above that of the level with the
        lowest probability, which it then replaces; returns whether it was added."""
        place = self.count
        if place == self.size:
            place = int(self.chances().argmin())
            if score <= self.score[place]:
                return False
            del self.place[int(self.number[place])], self.named[self.level[place].tobytes()]
        else:
            self.count += 1
        self.level[place] = level
        self.score[place] = score
        self.best[place] = best
        self.drawn[place], self.number[place] = self.clock, self.given
        self.place[self.given], self.named[level.tobytes()] = place, self.given
        self.given += 1
        return True

    def get_state(self) -> dict[str, Any]:
        n = self.count
        arrays: dict[str, NDArray[Any]] = {
            name: getattr(self, name)[:n].copy()
            for name in ("level", "score", "best", "drawn", "number")
        }
        return {**arrays, "given": self.given, "clock": self.clock}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore `get_state`."""
        self.count = n = len(state["score"])
        for name in ("level", "score", "best", "drawn", "number"):
            getattr(self, name)[:n] = state[name]
        self.given = state["given"]
        self.clock = state["clock"]
        numbers = self.number[:n].tolist()
        self.place = {number: place for place, number in enumerate(numbers)}
        self.named = {self.level[place].tobytes(): numbers[place] for place in range(n)}
