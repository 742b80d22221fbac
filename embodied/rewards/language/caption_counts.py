"""Counts of captions: how often each occurred, which are labelled, which are due for labelling.

A caption is due at its first occurrence, and again at twice the count if no label resulted. So
common captions are retried soon, those that no labeller can decide cost little, and none is
dropped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodied.core.remembered import Remembered

NEVER = np.iinfo(np.int64).max  # a count that is never reached


class CaptionCounts(Remembered):
    """Counters by caption number; number 0, the empty caption, is never due."""

    remembered = ("visits", "due", "labelled")

    def __init__(self) -> None:
        self.visits = np.zeros(0, np.int64)
        self.due = np.zeros(0, np.int64)  # count at which it is due (again)
        self.labelled = np.zeros(0, np.bool_)

    def count(self, numbers: NDArray[np.int64]) -> None:
        """Count occurrences of captions [n]."""
        if (room := int(numbers.max()) + 1) > len(self.visits):
            more = 2 * room - len(self.visits)
            self.visits = np.append(self.visits, np.zeros(more, np.int64))
            self.due = np.append(self.due, np.ones(more, np.int64))
            self.labelled = np.append(self.labelled, np.zeros(more, np.bool_))
        np.add.at(self.visits, numbers, 1)

    def wanted(self, numbers: NDArray[np.int64]) -> list[int]:
        """Return the due captions of `numbers`, each once."""
        due = (self.visits[numbers] >= self.due[numbers]) & (numbers > 0)
        return np.unique(numbers[due]).tolist()

    def others(self, number: int) -> NDArray[np.int64]:
        """All other captions that have occurred."""
        met = np.flatnonzero(self.visits[1:]) + 1
        return met[met != number]

    def asked(self, number: int) -> None:
        """Mark as in flight: not due until there is an answer."""
        self.due[number] = NEVER

    def again(self, number: int) -> None:
        """Mark as unanswered: due again at twice the count."""
        if not self.labelled[number]:
            self.due[number] = 2 * max(int(self.visits[number]), 1)

    def settled(self, number: int) -> None:
        """Mark as labelled."""
        self.labelled[number], self.due[number] = True, NEVER

    @property
    def coverage(self) -> float:
        """Fraction of all occurrences that are of labelled captions."""
        known = float(self.visits[1:].sum())
        return float(self.visits[self.labelled].sum()) / known if known else 0.0
