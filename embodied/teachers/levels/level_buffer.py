"""Library: levels worth playing again, and how likely each is to be drawn.

Prioritized level replay (Jiang, Grefenstette and Rocktaschel, 2021), by ranks (1: the best score):

    P = (1 - c) P_score + c P_stale,   P_score ~ (1 / rank)^(1 / beta),   P_stale ~ C - C_i

C is how many levels have been drawn, C_i how many when level i last was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.teachers.task_space import Floats


class Library:
    """At most `size` levels [D]. A level keeps its number for as long as it is here."""

    def __init__(self, size: int, width: int, beta: float, staleness: float) -> None:
        self.size, self.beta, self.staleness = size, beta, staleness
        self.level = np.zeros((size, width))
        self.score, self.best = np.zeros(size), np.zeros(size)
        self.drawn = np.zeros(size, np.int64)
        self.number = np.zeros(size, np.int64)
        self.count, self.given, self.clock = 0, 0, 0
        self.place: dict[int, int] = {}  # of a number
        self.named: dict[bytes, int] = {}  # the number of a level

    def __len__(self) -> int:
        return self.count

    def chances(self) -> Floats:
        """P [n] of the levels that are here."""
        n = self.count
        rank = np.empty(n)
        rank[np.argsort(-self.score[:n], kind="stable")] = np.arange(1, n + 1)
        # Of logarithms, as the power of a small rank may be too small for a number.
        weight = np.exp(-np.log(rank) / self.beta)
        old = (self.clock - self.drawn[:n]).astype(float)
        old = old / old.sum() if old.any() else np.full(n, 1 / n)
        return (1 - self.staleness) * weight / weight.sum() + self.staleness * old

    def draw(self, random: np.random.Generator) -> int:
        """The number of a level, which has now been drawn."""
        place = int(random.choice(self.count, p=self.chances()))
        self.clock += 1
        self.drawn[place] = self.clock
        return int(self.number[place])

    def get(self, number: int) -> Floats | None:
        """Level `number` [D]; None where it has left."""
        place = self.place.get(number)
        return None if place is None else self.level[place].copy()

    def find(self, level: Floats) -> int | None:
        """The number of a level that is here already."""
        return self.named.get(level.tobytes())

    def best_of(self, number: int | None) -> float:
        """The highest return on level `number`; minus infinity where it is not here."""
        place = None if number is None else self.place.get(number)
        return -np.inf if place is None else float(self.best[place])

    def rate(self, number: int, score: float, best: float) -> None:
        """Level `number`, if it is still here, has a new score."""
        place = self.place.get(number)
        if place is not None:
            self.score[place], self.best[place] = score, max(best, float(self.best[place]))

    def offer(self, level: Floats, score: float, best: float) -> bool:
        """Take in a new level, where there is room or its score is higher than that of the level
        that is least likely to be drawn; whether it was taken."""
        place = self.count
        if place == self.size:
            place = int(self.chances().argmin())
            if score <= self.score[place]:
                return False
            del self.place[int(self.number[place])], self.named[self.level[place].tobytes()]
        else:
            self.count += 1
        self.level[place], self.score[place], self.best[place] = level, score, best
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
        """Go on exactly from `get_state`."""
        self.count = n = len(state["score"])
        for name in ("level", "score", "best", "drawn", "number"):
            getattr(self, name)[:n] = state[name]
        self.given, self.clock = state["given"], state["clock"]
        numbers = self.number[:n].tolist()
        self.place = {number: place for place, number in enumerate(numbers)}
        self.named = {self.level[place].tobytes(): numbers[place] for place in range(n)}
